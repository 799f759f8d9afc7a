// The paste box: finds the recipes for a pasted traceback or symptom. It works on the index that was built with the
// site (paste_index.js), sends nothing anywhere, and only ever sets text, never markup.
(() => {
  const box = document.querySelector("#paste");
  const index = window.pasteIndex;
  if (!box || !index) return;

  // Terminals, notebooks and mail clients break lines, quote and colour. What is compared is letters and digits alone.
  const LIMIT = 200000; // of a longer text, the beginning and the end are read: a message stands at an end
  const squash = (text) => text.toLowerCase().replace(/[^a-z0-9_]+/g, "");
  const words = (text) => text.toLowerCase().match(/[a-z0-9_]+/g) || [];

  function clean(text) {
    if (text.length > LIMIT) text = `${text.slice(0, LIMIT / 4)}\n${text.slice((-3 * LIMIT) / 4)}`;
    return text
      .replace(/(?:\u001b|\\u001b|\\x1b|\\033|\u241b)\[[0-9;?]*[A-Za-z]/g, "")
      .replace(/\\n/g, "\n")
      .replace(/^[ \t>|│]+/gm, "");
  }

  // What Python itself says, in any program.
  const PYTHON = /positional argument|keyword argument|required argument|has no attribute|generator raised|arity/;

  // How rare a word is among the places: common ones tell nothing.
  const seen = new Map();
  const places = index.places.map((place) => {
    const rest = new Set(place.words.split(" "));
    for (const word of rest) seen.set(word, (seen.get(word) || 0) + 1);
    return { ...place, parts: words(place.match), rest, plain: PYTHON.test(place.match) };
  });
  const weight = (word) => Math.log(1 + places.length / (seen.get(word) || 1));

  // The runs of a fragment's words that the text holds, as [from, to). A name in the middle may be the reader's own.
  function runsOf(parts, squashed) {
    const runs = [];
    for (let from = 0; from < parts.length; ) {
      let to = from;
      while (to < parts.length && squashed.includes(parts.slice(from, to + 1).join(""))) to++;
      if (to - from > 1 || to - from === parts.length) runs.push([from, to]);
      from = Math.max(to, from + 1);
    }
    return runs;
  }

  // The words [from, to) of a fragment as they stand in it.
  function original(match, [from, to]) {
    const found = [...match.matchAll(/\w+/g)].slice(from, to);
    return match.slice(found[0].index, found.at(-1).index + found.at(-1)[0].length);
  }

  function scorePlace(place, paste) {
    const named = paste.errors.has(place.error.toLowerCase());
    const size = place.parts.join("").length;
    if (size === 0) return paste.bare.has(place.error.toLowerCase()) && paste.ours ? { score: 6, run: "" } : null;
    const runs = runsOf(place.parts, paste.squashed);
    const lengths = runs.map(([from, to]) => place.parts.slice(from, to).join("").length);
    const longest = Math.max(0, ...lengths);
    const covered = lengths.reduce((sum, length) => sum + length, 0) / size;
    // An incomplete fragment counts only with its class or if much of it is there, a short one only in a text about JAX.
    if (covered < 0.6 || longest < 8 || (covered < 1 && longest < 16)) return null;
    if ((!named && ((covered < 1 && longest < 40) || place.parts.length < 4)) || ((longest < 28 || place.plain) && !paste.ours)) return null;
    let total = 0;
    let shared = 0;
    for (const word of place.rest) {
      total += weight(word);
      if (paste.words.has(word)) shared += weight(word);
    }
    const called = place.calls.filter((call) => paste.words.has(call.toLowerCase())).length / (place.calls.length || 1);
    const inRow = paste.row !== null && place.rows.includes(paste.row);
    const score = 6 * covered + (named ? 2 : 0) + 4 * (shared / (total || 1)) + 2 * called + (inRow ? 2 : 0);
    const typical = place.typical ? 1 : 0;
    return { score: score + typical + Math.min(longest, 60) / 60, run: runs.map((run) => original(place.match, run)).join(" ... ") };
  }

  // The row of a release: the newest one that is not newer, else the oldest. Graph mode unless told otherwise.
  const parts = (release) => release.split(".").map(Number);
  const older = (a, b) => {
    for (let i = 0; i < 3; i++) if ((a[i] || 0) !== (b[i] || 0)) return (a[i] || 0) < (b[i] || 0);
    return true;
  };
  function rowOf(release) {
    const graph = index.rows.map((row, i) => [row, i]).filter(([row]) => row.mode === "graph");
    const found = graph.find(([row]) => older(parts(row.flax), parts(release)));
    return (found || graph[graph.length - 1])[1];
  }

  function search(text, chosen) {
    const cleaned = clean(text);
    const release = /\bflax[^\w\n]{0,4}(?:version)?[^\w\n]{0,4}v?(\d+\.\d+\.\d+)/i.exec(cleaned);
    const lower = cleaned.toLowerCase();
    const paste = {
      squashed: squash(cleaned),
      words: new Set(words(cleaned)),
      errors: new Set(`${lower}\n${lower.replaceAll("\n", "")}`.match(/\b\w*(?:error|exception|iteration)\b/g)),
      bare: new Set([...lower.matchAll(/^\w*error(?=:?[ \t]*$)/gm)].map((match) => match[0])),
      ours: /flax|\bnnx\b|\bjax\b|jaxlib|optax/i.test(cleaned),
      row: chosen !== "" ? Number(chosen) : release ? rowOf(release[1]) : null,
    };
    const best = new Map();
    for (const place of places) {
      const found = scorePlace(place, paste);
      if (found && !(best.get(place.recipe)?.score >= found.score)) best.set(place.recipe, { ...found, place });
    }
    for (const [symptom, recipe] of index.symptoms) {
      const wanted = [...new Set(words(symptom).filter((word) => word.length > 3))];
      const shared = wanted.filter((word) => paste.words.has(word));
      const score = (8 * shared.length) / wanted.length;
      if (paste.words.size < 60 && shared.length >= 3 && score >= 4.8 && !(best.get(recipe)?.score >= score))
        best.set(recipe, { score, run: shared.join(" "), place: { recipe, symptom } });
    }
    const results = [...best.values()].sort((a, b) => b.score - a.score).slice(0, 3);
    return { results: results.filter((result) => result.score > 0.45 * results[0].score), row: paste.row };
  }

  const element = (name, properties, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const names = (rows) => rows.map((row) => index.rows[row].name).join(", ");

  function advice(place, row) {
    if (place.symptom) return "Raises nothing. The page shows how to notice it and what to write instead.";
    const here = `Raised under ${names(place.rows)}.`;
    const runs = place.passes.length ? ` The same code runs under ${names(place.passes)}.` : "";
    if (row === null) return here + runs;
    const name = index.rows[row].name;
    if (place.rows.includes(row))
      return `${here}${runs} On ${name}, write what the page shows${runs ? ", or change to a release where it runs" : ""}.`;
    if (place.passes.includes(row)) return `${here} Under ${name} that page's code runs, so your cause may be another.`;
    return `${here}${runs} Not executed under ${name}.`;
  }

  function show({ results, row }) {
    status.textContent = results.length
      ? `${results.length} ${results.length === 1 ? "recipe matches" : "recipes match"}.`
      : "No recipe knows this text. Paste the last lines of the traceback, with the class of the error and its message.";
    list.replaceChildren(
      ...results.map(({ place, run }) => {
        const [title, summary] = index.recipes[place.recipe];
        const query = row !== null && place.rows?.includes(row) ? `?flax=${index.rows[row].name}` : "";
        const anchor = place.anchor ? `#${place.anchor}` : "";
        const link = element("a", { href: `${box.dataset.root}recipes/${place.recipe}.html${query}${anchor}` }, title);
        const heading = place.heading && place.heading !== title ? `: ${place.heading}` : "";
        const why = element("p", {}, "Matches ", ...(place.error ? [element("code", {}, place.error), " "] : []));
        why.append(run ? element("mark", {}, run) : "without a message");
        return element("li", {}, link, heading, why, element("p", {}, advice(place, row)), element("p", {}, summary));
      }),
    );
  }

  const input = element("textarea", { id: "paste-text", rows: 5, spellcheck: false });
  input.setAttribute("aria-describedby", "paste-note");
  const release = element("select", { id: "paste-row" }, element("option", { value: "" }, "not said, or as in the text"));
  index.rows.forEach((row, i) => release.append(element("option", { value: i }, row.name)));
  const status = element("p", { className: "paste-status" });
  status.setAttribute("role", "status");
  const list = element("ol", { className: "paste-results" });

  const update = () => {
    if (input.value.trim()) show(search(input.value, release.value));
    else status.textContent = "", list.replaceChildren();
  };
  input.addEventListener("input", update);
  release.addEventListener("change", update);
  box.replaceChildren(
    element("label", { htmlFor: "paste-text" }, "Paste an error or describe what goes wrong"),
    input,
    element("p", { id: "paste-note" }, "It stays in your browser."),
    element("p", {}, element("label", { htmlFor: "paste-row" }, "Your Flax release "), release),
    status,
    list,
  );
})();
