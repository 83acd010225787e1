"use strict";
// Elements. Everything from a run is inserted as text, never as HTML.

/** Create an element; `on...` properties are listeners, others attributes; null and false ones are skipped. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}

/** A foldable section; the key identifies it and its summary when the page is updated. */
function foldable(key, isOpen, name, summary, ...children) {
  const head = make("summary", { "data-key": key }, summary);
  return make("details", { "data-key": key, class: name, open: isOpen }, head, children);
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(visible(String(child)));
}

function byId(id) {
  return document.getElementById(id);
}

/** A choice among [value, label] pairs. */
function makeSelect(label, options, value, onchange) {
  const select = make("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(make("option", { value: key }, text));
  select.value = value;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  return select;
}

/** A field with its label around it. */
function labelled(text, field, extra = "") {
  return make("label", { class: `field ${extra}` }, make("span", {}, text), field);
}

/** Debounce a function. */
function settled(call, wait = 200) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}

/** Let the page draw and respond before work continues. */
function breathe() {
  return new Promise((resolve) => setTimeout(resolve, 0));
}

/** Whether the page is as narrow as on a phone. */
function isNarrow() {
  return matchMedia("(max-width: 800px)").matches;
}
