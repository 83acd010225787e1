"use strict";
// A session as a tree: each turn with its tool calls, and the output that trains it or why none does.

const MAX_TURNS = 300; // of a trajectory

/**
 * The turns of a trajectory: [{asked, start, stop, where, tools, unused, said}]; `where` is the output that trains it, or
 * why none does. Without turns from its loop, they are the runs of sampled tokens.
 */
function toldTurns({ text, response, part }) {
  if (!text.turns.length) return sampledTurns(text.output, response, part);
  const told = text.turns.slice(0, MAX_TURNS).map(([asked, start, stop, where, tools, unused]) => ({ asked, start, stop, where, tools, unused }));
  const begin = told.find(({ where }) => where === text.output)?.start; // of the response
  for (const turn of told) {
    if (turn.where === text.output) turn.said = (part?.texts ?? []).slice(turn.start - begin, turn.stop - begin).join("");
  }
  return told;
}

function sampledTurns(output, response, part) {
  const mask = part?.columns.mask ?? [];
  const turns = [];
  for (let start = 0; start < mask.length && turns.length < MAX_TURNS; ) {
    let stop = start;
    while (stop < mask.length && mask[stop] === mask[start]) stop++;
    const said = mask[start] ? response.slice(part.starts[start], part.starts[stop]) : "";
    const tools = [...innerBlocks(said, 0)].filter(([kind]) => kind === "call").map(([, from, to]) => said.slice(from, Math.min(to, from + 400)).match(CALLED));
    const named = tools.filter(Boolean).map((called) => called.slice(1).find(Boolean));
    if (mask[start]) turns.push({ asked: turns.length ? "reply" : "prompt", start, stop, where: output, tools: named, unused: {}, said });
    start = stop;
  }
  return turns;
}

/** Sequences of turns as maps of {turn, rows, next, ends}; shared turns of several trajectories occur once. */
function turnForest(rows) {
  const forest = new Map();
  for (const one of rows) {
    let [next, node] = [forest, null];
    for (const turn of one.turns) {
      const key = `${turn.where}/${turn.start}`;
      if (!next.has(key)) next.set(key, { turn, rows: [], next: new Map(), ends: [] });
      node = next.get(key);
      node.rows.push(one);
      if (turn.where === one.text.output) node.turn = turn; // this one has its text
      next = node.next;
    }
    node?.ends.push(one);
  }
  return forest;
}

/** The session of a trajectory; empty for a single turn without further data. */
function sessionTree(trajectories, number_, row, group) {
  const { session } = group.find((one) => one.row === row).text;
  const rows = group.filter(({ text }) => text.session === session).map((one) => ({ ...one, turns: toldTurns(one) }));
  const count = new Set(rows.flatMap(({ turns }) => turns.map(({ where, start }) => `${where}/${start}`))).size;
  if (count < 2 && !rows.some(({ text }) => text.turns.length)) return "";
  const leaf = (one) => make("li", {}, leafNodes(trajectories, number_, row, one, group), one.text.failure ? make("span", { class: "failure" }, ` Failed: ${snippet(one.text.failure, 200)}`) : "");
  const items = (nodes) => {
    const made = [];
    while (nodes.size) {
      const [first] = nodes.values();
      if (nodes.size > 1) return [...made, [...nodes.values()].map((node) => branch(node))];
      made.push(make("li", {}, turnLine(first, rows.length)));
      if (first.ends.length) made.push(first.ends.map(leaf));
      nodes = first.next;
    }
    return made;
  };
  const branch = (node) => make("li", {}, turnLine(node, rows.length), make("ul", {}, node.ends.map(leaf), items(node.next)));
  const title = `Session ${session}: ${plural(count, "turn")} in ${plural(rows.length, "recorded trajectory", "recorded trajectories")}`;
  return make("section", { class: "session" }, make("h3", {}, title), make("ul", { class: "tree" }, items(turnForest(rows))));
}

const WHY_NOT = { probe: "outside the task", retry: "sampled again", choice: "another choice", disconnected: "the client disconnected" };

function turnLine({ turn, rows }, numRows) {
  const { asked, start, stop, where, tools, unused, said } = turn;
  const trained = typeof where === "number" ? `trained${numRows > 1 ? ` in output ${where}` : ""}` : `masked: ${WHY_NOT[where] ?? where}`;
  const shared = rows.length > 1 ? `, shared by ${rows.length}` : "";
  const more = Object.entries(unused).map(([why, tokens]) => `; ${plural(tokens, "token")} more, untrained (${WHY_NOT[why] ?? why})`);
  return [
    make("strong", {}, `${asked} → assistant`), " ",
    make("span", { class: "muted" }, `${plural(stop - start, "token")}, ${trained}${shared}${more.join("")}`),
    tools.length ? [" calls ", make("code", {}, tools.join(", "))] : "",
    said ? ` ${shortly(said)}` : "",
  ];
}
