"use strict";
// What the page shows is in the URL behind the #: a link, and the way back, keep it.

const viewState = {
  listeners: [],

  get(name, otherwise = "") {
    return new URLSearchParams(location.hash.slice(1)).get(name) ?? otherwise;
  },

  number(name, otherwise = NaN) {
    const text = this.get(name).trim();
    return text === "" || !Number.isFinite(Number(text)) ? otherwise : Number(text);
  },

  /** A place among so many; any other number is none. */
  place(name, count, otherwise = -1) {
    const number_ = this.number(name);
    return Number.isInteger(number_) && number_ >= 0 && number_ < count ? number_ : otherwise;
  },

  /** A key of a table; any other text is none. */
  key(name, table, otherwise = "") {
    const text = this.get(name);
    return Object.hasOwn(table, text) ? text : otherwise;
  },

  /** Whether a number lies from one that was typed to another, both included; null where none was. */
  range(first, last) {
    const [low, high] = [asKept(this.number(first, -Infinity)), asKept(this.number(last, Infinity))];
    return low === -Infinity && high === Infinity ? null : (value) => value >= low && value <= high;
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
