// Tabs and the note above the chips say which row is shown, and give a way back. Without JavaScript the page is whole.
const shownRow = () => {
  const tab = document.querySelector(".sd-tab-set > input:checked + .sd-tab-label");
  return tab?.dataset.syncId || new URLSearchParams(location.search).get("flax");
};
(() => {
  const chips = document.querySelector("ul.rows");
  if (!chips) return;
  const rows = [...chips.querySelectorAll("a")];
  const newest = rows[0];
  const note = Object.assign(document.createElement("p"), { className: "shown-row", hidden: true });
  note.setAttribute("role", "status");
  chips.before(note);
  const tell = () => {
    const asked = new URLSearchParams(location.search).get("flax");
    const unknown = asked && !rows.some((a) => a.search === `?flax=${asked}`);
    const name = unknown ? asked : shownRow();
    const shown = rows.find((a) => a.search === `?flax=${name}`);
    for (const a of rows) a.removeAttribute("aria-current");
    if (shown && (asked || shown !== newest)) shown.setAttribute("aria-current", "true");
    note.hidden = !name || shown === newest;
    if (note.hidden) return;
    const code = Object.assign(document.createElement("code"), { textContent: name });
    const text = `${shown ? "Show" : "Shown is"} the newest, ${newest.querySelector("b").textContent}`;
    const back = Object.assign(document.createElement("a"), { href: newest.href, textContent: text });
    note.replaceChildren(shown ? "Shown for row " : "This page has not been executed under ", code, ". ", back, ".");
  };
  tell();
  for (const event of ["load", "change"]) addEventListener(event, tell);
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
    const row = shownRow();
    const known = [...document.querySelectorAll("ul.rows a")].some((a) => a.search === `?flax=${row}`);
    const page = document.querySelector("link[rel=canonical]")?.href || location.href.replace(/[?#].*/, "");
    return page + (known && newest.search !== `?flax=${row}` ? `?flax=${row}` : "");
  };
  box.addEventListener("click", async (event) => {
    const name = event.target.dataset.copy;
    if (!name) return;
    const text = box.querySelector(`#copy-${name}`).content.textContent;
    const link = /\[([^\]]*)\]\(PAGE-ADDRESS\)(?=[^\n]*\n$)/; // in the last line; a file of this machine is no address
    const filled = text.replace(link, (_, title) => (address().startsWith("file:") ? title : `[${title}](${address()})`));
    await navigator.clipboard.writeText(name === "reply" ? filled : text);
    box.querySelector("[role=status]").textContent = `${name === "reply" ? "Reply" : "Snippet"} copied`;
  });
  box.hidden = false;
})();
