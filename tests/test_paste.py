"""The paste box in a real browser: tracebacks that were really raised find their recipe, and nothing else does."""

import gzip
import random

import pytest
from playwright.sync_api import expect

from harness import contract, reports
from tests.browser import browser, tab, url
from tests.site import SHOWN, SITE

# The recipes that resolve a report's case, best first; an empty list says that no recipe does yet.
RECIPES = {
    "01_fori_pure_state_carry": ["fori_loop_rejects_accumulator"],
    "02_fori_grad_accum_jit_donate": ["fori_loop_rejects_accumulator"],
    "07_jaxgrad_merge_dropout": ["accumulate_with_split_merge", "different_trace_level"],
    "08_scan_layers_split_rngs_at_call": ["scan_over_layers"],
    "14_vmap_batchnorm_broadcast": ["batchnorm_and_dropout"],
    "15_optimizer_update_in_jaxjit_closure": ["different_trace_level"],
    "16_scan_sow_with_module_carry": [
        "module_changes_in_a_loop",
        "loop_arguments_and_axes",
        "metrics_in_loops",
    ],
    "20_plain_list_of_layers": ["scan_over_layers"],
    "21_scan_epoch_model_opt_carry": [
        "epoch_in_one_scan",
        "different_trace_level",
        "accumulate_with_scan",
        "accumulate_with_fori_loop",
    ],
    "22_lax_fori_scalar_init": ["carry_dtype_and_shape"],
    "23_accum_dtype_mismatch_scan": ["carry_dtype_and_shape"],
    "25_grad_through_dynamic_fori": ["different_trace_level", "while_loop_decode"],
    "30_clone_then_donate": ["donate_and_measure_memory"],
    "31_shard_map_scan_vma_carry": ["carry_dtype_and_shape", "reduce_once_per_step"],
    "27_vjp_with_refs_accum": [],  # its own assertion
    "33_optimizer_partition": ["optimizers_with_needs"],
    "35_jaxvmap_over_nnxjit": ["different_trace_level"],
    "37_stacked_layers_optimizer_mesh": ["scan_over_layers"],
}

UNRELATED = {
    "pandas": """Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/pandas/core/indexes/base.py", line 3805, in get_loc
    return self._engine.get_loc(casted_key)
KeyError: 'loss'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 12, in <module>
    frame["loss"]
  File "/usr/lib/python3/dist-packages/pandas/core/frame.py", line 4102, in __getitem__
    indexer = self.columns.get_loc(key)
KeyError: 'loss'""",
    "torch": """Traceback (most recent call last):
  File "train.py", line 31, in <module>
    loss.backward()
  File "torch/_tensor.py", line 581, in backward
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)
RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have
already been freed). Saved intermediate values of the graph are freed when you call .backward()""",
    "key error": "KeyError: 'encoder'",
    "assertion": 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    assert x\nAssertionError',
    "generator": "RuntimeError: generator raised StopIteration",
    "arguments": "TypeError: predict() takes 1 positional argument but 2 were given",
    "attribute": "AttributeError: 'NoneType' object has no attribute 'shape'",
    "out of memory": """jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to
allocate 17179869184 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    3.50GiB
              constant allocation:         0B
    preallocated temp allocation:   16.00GiB""",
    "prose": "How do I train a model? It does not work and I do not know why. The loss is strange.",
    "nothing": "   \n\t ",
}


@pytest.fixture
def box(tab):
    """The errors page with its box; `box(text, row="")` pastes a text and gives the recipes that are shown."""
    tab.goto(url("docs/errors.html"))

    def paste(text, row=""):
        if row:
            tab.select_option("#paste-row", label=row)
        # As a paste does it: the value is set at once. The time is what the page needs to answer.
        tab.answer_ms = tab.evaluate(
            """text => {
                const input = document.querySelector("#paste-text");
                input.value = text;
                const began = performance.now();
                input.dispatchEvent(new Event("input"));
                return performance.now() - began;
            }""",
            text,
        )
        links = tab.locator("#paste ol a").evaluate_all(
            "links => links.map(link => link.getAttribute('href'))"
        )
        return [link.split("/")[-1].partition(".html")[0] for link in links]

    paste.tab = tab
    return paste


def raised() -> list[tuple[str, str, str]]:
    """Row, case and traceback of every report that raised under the rows shown."""
    found = [
        (row, path.stem, path.read_text())
        for row in SHOWN
        for path in sorted((reports.RAN / row).glob("*.txt"))
    ]
    assert found, "no tracebacks: `nox -s recipes` makes them"
    return found


def test_every_case_is_listed_and_every_listed_recipe_exists():
    cases = {path.stem for path in reports.CASES.glob("*.py")}
    assert {case for _, case, _ in raised()} <= set(RECIPES) <= cases
    assert {name for names in RECIPES.values() for name in names} <= set(contract.names())


def test_real_tracebacks_find_their_recipe(box):
    wrong, first, covered = [], 0, 0
    for row, case, text in raised():
        found, wanted = box(text), RECIPES[case]
        if not wanted and found:
            wrong.append(f"{row} {case}: no recipe yet, but sent to {found}")
        elif wanted:
            covered += 1
            first += found[:1] != [] and found[0] in wanted
            if not set(found[:3]) & set(wanted):
                wrong.append(f"{row} {case}: {wanted} not among {found}")
    assert not wrong, "\n".join(wrong)
    assert first >= 0.9 * covered, f"first for {first} of {covered}"


@pytest.mark.parametrize("name", UNRELATED)
def test_unrelated_texts_match_nothing(box, name):
    assert box(UNRELATED[name]) == []
    if UNRELATED[name].strip():
        assert "No recipe knows this text" in box.tab.inner_text("#paste [role=status]")


def hard_wrap(text, width=47):
    return "\n".join(text[i : i + width] for i in range(0, len(text), width))


DISGUISES = {
    "ANSI colours": lambda text: "".join(f"\x1b[0;31m{line}\x1b[0m\n" for line in text.splitlines()),
    "escaped ANSI of a notebook file": lambda text: "".join(f"\\u001b[0;31m{line}\\u001b[0m\\n" for line in text.splitlines()),
    "quoted in a mail": lambda text: "".join(f"> > {line}\n" for line in text.splitlines()),
    "broken by a narrow terminal": hard_wrap,
    "broken in the last line's class": lambda text: hard_wrap(" " * ((40 - text.rfind("Error: ")) % 47) + text),
    "Windows paths and line ends": lambda text: text.replace("/", "\\").replace("\n", "\r\n"),
    "the head is missing": lambda text: text[len(text) // 3 :],
    "chained to another exception": lambda text: (
        f"{text}\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File \"a.py\", line 3\nKeyError: 'x'\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_traceback_is_found_however_it_was_copied(box, disguise):
    for row, case, text in raised():
        if RECIPES[case]:
            found = box(DISGUISES[disguise](text))
            assert set(found) & set(RECIPES[case]), f"{row} {case}: {found}"


def test_a_message_that_is_cut_off_is_found(box):
    message = "ValueError: nnx.while_loop requires body function's input and output to have the same refere"
    assert "fori_loop_rejects_accumulator" in box(message)


def test_what_matched_and_what_to_do_on_the_named_release_is_said(box):
    text = "ValueError: nnx.fori_loop requires body function's input and output to have the same reference and pytree structure"
    assert box(text)[0] == "fori_loop_rejects_accumulator"
    results = box.tab.locator("#paste ol li").first
    assert "same reference and pytree structure" in results.locator("mark").inner_text()
    assert f"The same code runs under {SHOWN[0]}" in results.inner_text()
    box(text + "\nflax==0.12.1")  # between two rows: the older one answers
    assert "0.11.2" in results.inner_text() or "0.12.2" in results.inner_text()
    box(text, "0.12.2")
    assert (
        "On 0.12.2, write what the page shows, or change to a release where it runs" in results.inner_text()
    )
    assert "?flax=0.12.2#" in results.locator("a").get_attribute("href")
    results.locator("a").click()
    expect(box.tab.locator("article div.raises:visible").first).to_contain_text("Raises ValueError on 0.12.2")


def test_symptoms_that_raise_nothing_are_found(box):
    assert "accumulate_with_scan" in box("every minibatch is the whole batch")


def test_hostile_texts_do_no_harm(box):
    """Ten thousand random and hostile strings and a megabyte: no exception, no markup, no request, no delay."""
    tab = box.tab  # whose teardown asserts that nothing was requested and no error logged
    seeds = [
        "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "</textarea><b>", "\u202e\u0000\u0007\ufffd", "${1}{{2}}",
        "ValueError:", "TraceContextError: Cannot mutate", "javascript:alert(1)", "\\u001b[", "\x1b[31m", "(((((a+)+)+)+)+", "__proto__",
        "constructor", "nnx.fori_loop requires body function's input", "flax==999999999999.0.0", "%s%n", "'\"`;--", "\ud83d\ude00", "&lt;b&gt;",
    ]  # fmt: skip
    chance = random.Random(0)
    texts = []
    for _ in range(10_000):
        pieces = [
            chance.choice(seeds)
            if chance.random() < 0.5
            else chr(chance.randrange(1, 0xD7FF)) * chance.randrange(4)
            for _ in range(6)
        ]
        texts.append("".join(pieces))
    before = tab.evaluate(
        "document.querySelectorAll('article *').length - document.querySelectorAll('#paste *').length"
    )
    slowest = tab.evaluate(
        """texts => {
            const input = document.querySelector("#paste-text");
            let slowest = 0;
            for (const text of texts) {
                input.value = text;
                const began = performance.now();
                input.dispatchEvent(new Event("input"));
                slowest = Math.max(slowest, performance.now() - began);
                if (document.querySelector("#paste img, #paste script, #paste b, #paste ol ol")) throw new Error(text);
            }
            return slowest;
        }""",
        texts,
    )
    after = tab.evaluate(
        "document.querySelectorAll('article *').length - document.querySelectorAll('#paste *').length"
    )
    assert before == after
    assert slowest < 1000
    megabyte = "".join(chance.choice(seeds) + "\n" for _ in range(60_000))[:1_000_000]
    box(megabyte + max((text for _, _, text in raised()), key=len))
    assert tab.answer_ms < 1000, tab.answer_ms


def test_ordinary_pastes_are_answered_at_once(box):
    times = []
    for _, _, text in raised():
        box(text)
        times.append(box.tab.answer_ms)
    assert sorted(times)[len(times) // 2] < 100, times


def test_the_keyboard_reaches_everything_and_results_are_announced(box):
    tab = box.tab
    tab.locator("#paste-text").focus()
    tab.keyboard.type(
        "ValueError: nnx.while_loop requires body function's input and output to have the same reference"
    )
    status = tab.locator("#paste [role=status]")
    assert "match" in status.inner_text()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "paste-row"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('#paste ol') !== null")
    assert (
        tab.locator("label[for=paste-text]").is_visible() and tab.locator("label[for=paste-row]").is_visible()
    )


def test_without_javascript_the_box_is_a_link_to_the_index(browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url("index.html"))
    page.get_by_role("link", name="Find your error in the index").click()
    assert page.title().startswith("Find an error")
    context.close()


def test_the_index_is_small():
    script = (SITE / "_static" / "paste_index.js").read_bytes()
    assert len(gzip.compress(script)) < 30 * 1024
