"use strict";

/** A table; a heading may be [text, kind] with kind "number", "moment" or "long"; cells are texts or elements. */
function makeTable(caption, headings, rows) {
  const kinds = headings.map((heading) => (Array.isArray(heading) ? heading[1] : null));
  const head = headings.map((heading, place) => {
    const [text] = [heading].flat();
    return make(text === "" ? "td" : "th", { scope: text === "" ? null : "col", class: kinds[place] }, text);
  });
  const body = rows.map((cells) =>
    make("tr", {}, cells.map((cell, place) => make("td", { class: kinds[place] }, cell))),
  );
  return make(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)),
  );
}
