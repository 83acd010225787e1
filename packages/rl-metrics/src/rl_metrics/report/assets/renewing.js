"use strict";
// A page that is renewed while somebody reads: where the reader was, and what was being typed, stay.

const SETTLE_MS = 1000;

/** Renders anew, and puts back scrolling, the focus, half-typed fields, and what is folded. */
function keepingPlace(main, render) {
  const folded = foldables(main).filter(({ open }) => !open).map(foldName);
  const field = main.contains(document.activeElement) ? fieldState(document.activeElement) : null;
  const [top, listTop] = [scrollY, main.querySelector(".list")?.scrollTop];
  main.style.minHeight = `${main.offsetHeight}px`; // or the page would jump up until all is drawn
  setTimeout(() => (main.style.minHeight = ""), SETTLE_MS);
  render();
  for (const one of foldables(main)) if (folded.includes(foldName(one))) one.open = false;
  const list = main.querySelector(".list");
  if (list && listTop !== undefined) list.scrollTop = listTop;
  if (field) putBack(main, field);
  scrollTo(scrollX, top);
}

function foldables(main) {
  return [...main.querySelectorAll("details")];
}

function foldName(details) {
  return details.querySelector("summary h2, summary strong")?.textContent;
}

function fieldState(element) {
  const selector = ["name", "id", "aria-label"]
    .filter((name) => element.getAttribute(name))
    .map((name) => `${element.localName}[${name}="${CSS.escape(element.getAttribute(name))}"]`)[0];
  const isText = element.matches("input[type=search]");
  return { selector, value: element.value, selection: isText ? [element.selectionStart, element.selectionEnd] : null };
}

function putBack(main, { selector, value, selection }) {
  const element = selector ? main.querySelector(selector) : null;
  if (!element) return;
  element.focus({ preventScroll: true });
  if (value === undefined || element.localName !== "input") return;
  if (element.value !== value) {
    element.value = value;
    element.dispatchEvent(new Event("input"));
  }
  if (selection) element.setSelectionRange(...selection);
}
