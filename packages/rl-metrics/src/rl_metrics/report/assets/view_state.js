"use strict";
// What the page shows is in the URL behind the #: a link, and the way back, keep it.

const viewState = {
  listeners: [],

  get(name, otherwise = "") {
    return new URLSearchParams(location.hash.slice(1)).get(name) ?? otherwise;
  },

  number(name, otherwise = NaN) {
    const text = this.get(name);
    return text === "" || Number.isNaN(Number(text)) ? otherwise : Number(text);
  },

  /** Change some of it; "" and null take a name out. A step of the history only where asked for;
   * quietly where the caller shows the change itself. */
  set(changes, { isStep = false, isQuiet = false } = {}) {
    const hash = this.link(changes);
    if (hash === location.hash) return;
    if (isStep) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
    if (!isQuiet) this.tell();
  },

  /** The address of the page with some of it changed, or, isFresh, with nothing else. */
  link(changes, { isFresh = false } = {}) {
    const parameters = new URLSearchParams(isFresh ? "" : location.hash.slice(1));
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === undefined || Number.isNaN(value)) parameters.delete(name);
      else parameters.set(name, String(value));
    }
    return `#${parameters}`;
  },

  tell() {
    for (const listener of this.listeners) listener();
  },
};

addEventListener("hashchange", () => viewState.tell());
addEventListener("popstate", () => viewState.tell());
