"use strict";
// Turns of a conversation as elements: roles, tool calls and results as blocks, reasoning folded.

const TURN_CLASSES = ["system", "user", "assistant", "tool", "prompt", "response", "reply"];
const FOLDED_FROM = 800; // characters of a system turn

/** Elements of turns; `show(start, end)` returns the nodes of a range of the text. */
function turnNodes(text, turns, show) {
  return turns.map((turn) => {
    const { role, head, start, begun } = turn;
    const marker = [begun ?? null, show(head, start)];
    return make(
      "section", { class: `turn ${TURN_CLASSES.includes(role) ? role : "other"}` },
      make("div", { class: "role" }, make("strong", {}, role), " ", make("span", { class: "marker" }, marker)),
      blocksOf(text, turn).map((block) => blockNode(text, turn, block, show)),
    );
  });
}

function blockNode(text, turn, { kind, start, end }, show) {
  if (kind === "end") return make("span", { class: "marker" }, show(start, end));
  const shown = show(start, end); // each token has its own direction
  const said = make("pre", { class: "said", dir: typeof shown === "string" ? "auto" : null }, shown);
  const length = `${plural(text.slice(start, end).split(/\s+/).filter(Boolean).length, "word")}`;
  if (kind === "reasoning") return make("details", { class: "block reasoning" }, make("summary", {}, `Reasoning, ${length}`), said);
  if (kind === "text" && turn.role === "system" && end - start > FOLDED_FROM) {
    return make("details", { class: "block" }, make("summary", {}, `${snippet(text.slice(start, end), 80)} (${length})`), said);
  }
  if (kind === "text") return said;
  const called = kind === "call" ? `${turn.channel} ${text.slice(start, Math.min(end, start + 400))}`.match(CALLED) : null;
  const name = called?.slice(1).find(Boolean) ?? "";
  const title = kind === "call" ? `Tool call${name ? `: ${name}` : ""}` : "Result";
  return make("div", { class: `block ${kind}` }, make("div", { class: "block-name" }, title), said);
}
