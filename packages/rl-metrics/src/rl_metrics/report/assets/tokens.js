"use strict";
// A response, token by token: colored, with facts on hover and by the arrow keys.

const LINE_ENDS = /\n/g;
const MOVES = new Map([["ArrowRight", 1], ["ArrowLeft", -1], ["PageDown", 50], ["PageUp", -50], ["End", Infinity], ["Home", -Infinity]]);
const MOST_BYTES = 4; // of a character

/**
 * Texts of tokens within the response, because a single token may be part of a character, or lose its space.
 * Returns the tokens themselves if they do not match the response.
 */
function readTokens(tokens, response) {
  if (tokens.join("") === response) return tokens;
  const shown = [];
  let [place, parts] = [0, 0];
  for (const token of tokens) {
    if (token.includes("\ufffd")) {
      shown.push("");
      parts++;
      continue;
    }
    const at = response.indexOf(token, place);
    if (at < 0 || at - place > Math.max(1, parts * MOST_BYTES)) return tokens;
    const between = response.slice(place, at);
    if (parts) shown[shown.length - 1] = between;
    shown.push(parts ? token : between + token);
    place = at + token.length;
    parts = 0;
  }
  if (parts) shown[shown.length - 1] = response.slice(place);
  return parts || place === response.length ? shown : tokens;
}

/** Start of each text in their concatenation, followed by its end. */
function startsOf(texts) {
  return texts.reduce((starts, { length }) => (starts.push(starts.at(-1) + length), starts), [0]);
}

/** [start, end] in the concatenation of each run of tokens that were not sampled. */
function repliesOf(mask, starts) {
  const replies = [];
  mask?.forEach((isSampled, place) => {
    if (isSampled) return;
    if (replies.at(-1)?.[1] === starts[place]) replies.at(-1)[1] = starts[place + 1];
    else replies.push([starts[place], starts[place + 1]]);
  });
  return replies;
}

/**
 * The elements. part: {tokens, ids, texts, starts, columns}; `lay(show)` returns the turns of the tokens, `coloring()`
 * the name of the coloring, and `told(place)` is called with a chosen token. `paint` updates the colors.
 */
function tokenView(part, learnerVersion, { coloring, lay, told }) {
  const spans = part.tokens.map((token, place) => {
    const isSampled = !part.columns.mask || part.columns.mask[place] > 0;
    const span = make("bdi", { class: `token${isSampled ? "" : " masked"}${part.columns.differs?.[place] ? " differs" : ""}`, "data-place": place });
    span.textContent = visible(part.texts[place]).replace(LINE_ENDS, "↵\n") || (token || !isSampled ? "" : "∅"); // of an image, all but the first token have no text
    return span;
  });
  let next = 0;
  const show = (_, end) => {
    const first = next;
    while (next < spans.length && part.starts[next] < end) next++;
    return spans.slice(first, next);
  };
  const detail = make("dl", { class: "facts", "aria-live": "polite" });
  const box = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Response, token by token" }, lay(show), spans.slice(next));
  const goTo = walkTokens(box, spans, detail, (place) => tokenFacts(part, place, learnerVersion), told);
  const paint = () => {
    const color = (COLORINGS[coloring()]?.[3] ?? COLORINGS.none[3])(part.columns);
    spans.forEach((span, place) => (span.style.backgroundColor = color(place)));
  };
  paint();
  return { nodes: [box, detail], paint, goTo };
}

/** Show facts of a token by pointer and keys; returns a function that moves to a token. */
function walkTokens(box, spans, detail, factsOf, told) {
  let current = -1;
  const tell = (place) => {
    spans[current]?.classList.remove("current");
    current = place;
    spans[current].classList.add("current");
    detail.replaceChildren(...factNodes(factsOf(place)));
    told(place);
  };
  const goTo = (place) => {
    const folded = spans[place].closest("details");
    if (folded) folded.open = true;
    tell(place);
    spans[place].scrollIntoView({ block: "nearest" });
  };
  const over = (event, call) => {
    const span = event.target.closest(".token");
    if (span) call(Number(span.dataset.place), span);
  };
  box.addEventListener("pointerover", (event) => over(event, (place, span) => showTip(span, factsOf(place))));
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => over(event, tell));
  box.addEventListener("keydown", (event) => {
    const by = MOVES.get(event.key);
    if (!by || !spans.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    goTo(Math.min(Math.max(current + by, 0), spans.length - 1));
  });
  return goTo;
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
