// A reader who came by ?flax=ROW sees which row is shown and a way back. Without JavaScript the page is whole without it.
(() => {
  const asked = new URLSearchParams(location.search).get("flax");
  const chips = document.querySelector("ul.rows");
  if (!asked || !chips) return;
  const rows = [...chips.querySelectorAll("a")];
  const newest = rows[0];
  const shown = rows.find((a) => a.search === `?flax=${asked}`);
  if (shown) shown.setAttribute("aria-current", "true");
  if (shown === newest) return;

  const note = document.createElement("p");
  note.className = "shown-row";
  note.setAttribute("role", "status");
  note.append(shown ? "Shown for row " : "This page has not been executed under ");
  const name = document.createElement("code");
  name.textContent = asked;
  note.append(name, ". ");
  const back = document.createElement("a");
  back.href = newest.href;
  back.textContent = `${shown ? "Show" : "Shown is"} the newest, ${newest.querySelector("b").textContent}`;
  note.append(back, ".");
  chips.before(note);
})();

// Code and tables that are wider than their box can be scrolled with the keyboard.
(() => {
  const reach = () => {
    for (const box of document.querySelectorAll("article pre, .table-wrapper, .wide")) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  reach();
  for (const event of ["load", "resize"]) addEventListener(event, reach);
  for (const event of ["change", "toggle"]) document.addEventListener(event, reach, true);
})();

// The theme has two asides without a name; a screen reader lists them by it.
document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "All pages");
document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");

// The buttons that copy the snippet, and the reply with the address of this page for the release that is chosen.
(() => {
  const box = document.querySelector("div.copy");
  if (!box || !navigator.clipboard) return;
  const newest = document.querySelector("ul.rows a");
  const address = () => {
    const tab = document.querySelector(".sd-tab-set > input:checked + .sd-tab-label");
    const row = tab?.dataset.syncId || new URLSearchParams(location.search).get("flax");
    const known = [...document.querySelectorAll("ul.rows a")].some((a) => a.search === `?flax=${row}`);
    const page = document.querySelector("link[rel=canonical]")?.href || location.href.replace(/[?#].*/, "");
    return page + (known && newest.search !== `?flax=${row}` ? `?flax=${row}` : "");
  };
  box.addEventListener("click", async (event) => {
    const name = event.target.dataset.copy;
    if (!name) return;
    const text = box.querySelector(`#copy-${name}`).content.textContent;
    await navigator.clipboard.writeText(text.replace("PAGE-ADDRESS", address));
    box.querySelector("[role=status]").textContent = `${name === "reply" ? "Reply" : "Snippet"} copied`;
  });
  box.hidden = false;
})();
