"use strict";
// The state of the page is in the URL after #, so that links and the back button keep it.

const viewState = {
  listeners: [],

  get(name, otherwise = "") {
    return new URLSearchParams(location.hash.slice(1)).get(name) ?? otherwise;
  },

  number(name, otherwise = NaN) {
    const text = this.get(name).trim();
    return text === "" || !Number.isFinite(Number(text)) ? otherwise : Number(text);
  },

  /** An index below `count`; any other number is ignored. */
  place(name, count, otherwise = -1) {
    const number_ = this.number(name);
    return Number.isInteger(number_) && number_ >= 0 && number_ < count ? number_ : otherwise;
  },

  /** A key of a table; any other text is ignored. */
  key(name, table, otherwise = "") {
    const text = this.get(name);
    return Object.hasOwn(table, text) ? text : otherwise;
  },

  /** A predicate for a typed range, ends included; null without one. */
  range(first, last) {
    const [low, high] = [asKept(this.number(first, -Infinity)), asKept(this.number(last, Infinity))];
    return low === -Infinity && high === Infinity ? null : (value) => value >= low && value <= high;
  },

  /** Change some values; "" and null remove a name. isStep adds a step to the history;
   * isQuiet is for callers that show the change themselves. */
  set(changes, { isStep = false, isQuiet = false } = {}) {
    const hash = this.link(changes);
    if (hash === location.hash) return;
    if (isStep) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
    if (!isQuiet) this.tell();
  },

  /** The page's address with some values changed; isFresh keeps no others. */
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
