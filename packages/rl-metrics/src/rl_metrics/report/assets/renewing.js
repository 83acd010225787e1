"use strict";
// Updates of the page while it is read: position and typed text are kept.

const SETTLE_MS = 1000;
const KEPT_BY = ["data-key", "name", "id", "aria-label", "href"];

/** Render again, and restore scrolling, focus, typed text, and folding. */
function keepingPlace(main, render) {
  const states = new Map(foldables(main).map((one) => [one.dataset.key, one.open]));
  const field = fieldState(document.activeElement);
  const [top, listTop] = [scrollY, main.querySelector(".list")?.scrollTop];
  main.style.minHeight = `${main.offsetHeight}px`; // otherwise the page would jump up until everything is drawn
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

/** How to find the focused element again, and its typed text; null without one. */
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

/** Restore the focus, also to elements that appear only after a part of the report is loaded. */
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
