"use strict";
// A page that is renewed while somebody reads: where the reader was, and what was being typed, stay.

const SETTLE_MS = 1000;
const KEPT_BY = ["data-key", "name", "id", "aria-label", "href"];

/** Renders anew, and puts back scrolling, the focus, half-typed fields, and what is folded or not. */
function keepingPlace(main, render) {
  const states = new Map(foldables(main).map((one) => [one.dataset.key, one.open]));
  const field = fieldState(document.activeElement);
  const [top, listTop] = [scrollY, main.querySelector(".list")?.scrollTop];
  main.style.minHeight = `${main.offsetHeight}px`; // or the page would jump up until all is drawn
  setTimeout(() => (main.style.minHeight = ""), SETTLE_MS);
  render();
  for (const one of foldables(main)) one.open = states.get(one.dataset.key) ?? one.open;
  const list = main.querySelector(".list");
  if (list && listTop !== undefined) list.scrollTop = listTop;
  if (field) putBack(field);
  scrollTo(scrollX, top);
}

function foldables(main) {
  return [...main.querySelectorAll("details[data-key]")];
}

/** How the element that has the focus is found again, and what was typed into it; null where none has it. */
function fieldState(element) {
  if (!element || element === document.body) return null;
  const by = KEPT_BY.find((name) => element.hasAttribute(name));
  const named = (one) => (by ? one.getAttribute(by) : one.textContent);
  const name = named(element);
  const alike = () => [...document.body.querySelectorAll(element.localName)].filter((one) => named(one) === name);
  const place = alike().indexOf(element);
  const isText = element.matches("input[type=search]");
  const selection = isText ? [element.selectionStart, element.selectionEnd] : null;
  return { find: () => alike()[place], value: element.value, selection };
}

/** Gives the focus back, also to what comes only when a part of the report was read. */
function putBack(field) {
  const focus = () => {
    if (document.activeElement === document.body) putInto(field.find(), field);
  };
  focus();
  const drawn = new MutationObserver(focus);
  drawn.observe(document.body, { childList: true, subtree: true });
  setTimeout(() => drawn.disconnect(), SETTLE_MS);
}

function putInto(element, { value, selection }) {
  if (!element) return;
  element.focus({ preventScroll: true });
  if (element.localName !== "input") return;
  if (element.value !== value) {
    element.value = value;
    element.dispatchEvent(new Event("input"));
  }
  if (selection) element.setSelectionRange(...selection);
}
