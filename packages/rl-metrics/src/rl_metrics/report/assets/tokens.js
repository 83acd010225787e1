"use strict";
// A response, token by token: coloured, told of on hover and by the arrow keys.

const LINE_ENDS = /\n/g;
const MOVES = new Map([["ArrowRight", 1], ["ArrowLeft", -1], ["PageDown", 50], ["PageUp", -50], ["End", Infinity], ["Home", -Infinity]]);

/** The element; `coloring()` names the colouring. Its `paint` colours anew. */
function tokenView(part, learnerVersion, coloring) {
  const spans = part.tokens.map((token, place) => {
    const isSampled = !part.columns.mask || part.columns.mask[place] > 0;
    const span = make("bdi", { class: isSampled ? "token" : "token masked", "data-place": place });
    span.textContent = visible(token).replace(LINE_ENDS, "↵\n") || "∅";
    return span;
  });
  const detail = make("dl", { class: "facts", "aria-live": "polite" });
  const box = make(
    "div",
    { class: "tokens", tabindex: "0", role: "group", "aria-label": "Response, token by token: arrow keys, page up, page down, home and end move" },
    spans,
  );
  let current = -1;
  const tell = (place) => {
    spans[current]?.classList.remove("current");
    current = place;
    spans[current].classList.add("current");
    detail.replaceChildren(...factNodes(tokenFacts(part, place, learnerVersion)));
  };
  box.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) showTip(span, tokenFacts(part, Number(span.dataset.place), learnerVersion));
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span) tell(Number(span.dataset.place));
  });
  box.addEventListener("keydown", (event) => {
    const by = MOVES.get(event.key);
    if (!by || !spans.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    tell(Math.min(Math.max(current + by, 0), spans.length - 1));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  const paint = () => {
    const color = (COLORINGS[coloring()]?.[3] ?? COLORINGS.none[3])(part.columns);
    spans.forEach((span, place) => (span.style.backgroundColor = color(place)));
  };
  paint();
  return { nodes: [box, detail], paint };
}

function factNodes(facts) {
  return facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]);
}

function showTip(target, facts) {
  const tip = byId("tip");
  tip.replaceChildren(make("dl", { class: "facts" }, factNodes(facts)));
  tip.hidden = false;
  const { left, bottom, top } = target.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const fitsBelow = bottom + height + 8 < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${fitsBelow ? bottom + 6 : Math.max(4, top - height - 6)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
