"use strict";
// The responses of one group: where they diverge, and two of them side by side.

/** The report's trajectories of a row's group: [{row, text, response, part}]. */
async function groupOf(trajectories, row) {
  const { step, problem } = trajectories.columns;
  const ofStep = trajectories.ofProblem(trajectories.names.problem[problem[row]]).filter((other) => step[other] === step[row]);
  const near = aroundRow(ofStep, ofStep.indexOf(row));
  const known = await Promise.all(near.map(async (other) => ({ row: other, ...(await readWhole(trajectories, other)) })));
  const { uid } = known.find((one) => one.row === row).text;
  const of = known.filter(({ text }) => text.uid === uid);
  return of.sort(({ text: one }, { text: other }) => one.session - other.session || one.output - other.output);
}

const CONTROLS = /<[|｜][^<>]{1,40}[|｜]>/g;

function sessionName({ session, output }, group) {
  const hasOutputs = group.some(({ text }) => text.session === session && text.output !== output);
  return `session ${session}${hasOutputs || output ? `, output ${output}` : ""}`;
}

/** Buttons to copy and link, and, if the group has others, a choice to compare with. */
function actionBar(trajectories, number_, row, own, group) {
  const others = group.filter((one) => one.row !== row);
  const { reward } = trajectories.columns;
  const choices = others.map((one) => [String(one.row), `${sessionName(one.text, group)}: reward ${number(reward[one.row])}`]);
  const compare = (value) => viewState.set({ with: value, color: "" }, { isStep: true });
  return make(
    "div", { class: "bar actions" },
    make("button", { type: "button", onclick: ({ currentTarget }) => copyJson(currentTarget, trajectories, row, own) }, "Copy as JSON"),
    make("a", { href: viewState.link({ view: "rollouts", run: number_ || "", row }, { isFresh: true }) }, "Link"),
    others.length ? labelled("Compare with", makeSelect("Compare with", [["", "none"], ...choices], viewState.get("with"), compare)) : null,
  );
}

/**
 * A tree of trajectories by shared turns: {rows, shared, children}; a leaf has its own turns.
 * rows: [{row, text, turns}], turns as texts with their role.
 */
function forks(rows, from = 0) {
  let end = from;
  const [{ turns }] = rows;
  while (end < turns.length && rows.every((one) => one.turns[end]?.key === turns[end].key)) end++;
  const byTurn = new Map();
  for (const one of rows) {
    const key = one.turns[end]?.key;
    byTurn.set(key, [...(byTurn.get(key) ?? []), one]);
  }
  const children = byTurn.size > 1 ? [...byTurn.values()].map((some) => forks(some, end)) : [];
  return { rows, shared: turns.slice(from, end), children };
}

/** The beginning of a turn, without control tokens. */
function shortly(text) {
  return snippet(text.slice(0, 300).replace(CONTROLS, " ").trim(), 80);
}

/** A group as a tree: common turns of several responses once, followed by their branches. */
function groupTree(trajectories, number_, row, group) {
  if (group.length < 2) return "";
  const rows = group.map((one) => {
    const { asked, answered } = turnsOf(one);
    const told = (text) => ({ role, start, end }) => ({ role, key: `${role}\n${text.slice(start, end)}`, said: shortly(text.slice(start, end)) });
    return { ...one, turns: [...asked.map(told(one.text.prompt)), ...answered.map(told(one.response))] };
  });
  const item = ({ rows: of, shared, children }) => {
    const roles = shared.map(({ role }) => role).join(", ");
    if (!children.length) return of.map((one) => make("li", {}, leafNodes(trajectories, number_, row, one, group)));
    const said = shared.length ? `: ${shared.at(-1).said}` : "";
    return make("li", {}, make("span", { class: "muted" }, `${roles || "nothing"}, shared by ${of.length}${said}`), make("ul", {}, children.map(item)));
  };
  const title = `Group of step ${trajectories.columns.step[row]}: ${group.length} recorded responses, and where they diverge`;
  return make("section", { class: "group" }, make("h3", {}, title), make("ul", { class: "tree" }, item(forks(rows))));
}

function leafNodes(trajectories, number_, row, { row: own, text }, group) {
  const link = make(
    "a", { href: viewState.link({ run: number_ || "", row: own, ...NO_CHOICE }), "aria-current": own === row ? "true" : null },
    sessionName(text, group),
  );
  const score = make("span", { class: `score ${trajectories.kind(own)}` }, number(trajectories.columns.reward[own]));
  return [link, " ", score, " ", trajectories.responses[own] || "∅"];
}
