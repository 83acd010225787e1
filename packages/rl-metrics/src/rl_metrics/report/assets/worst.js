"use strict";
// Worst cases: trajectories that failed or scored below 0.5, grouped.

const GROUPINGS = { source: "source", finish: "finish", failure: "failure", problem: "problem" };
const MAX_GROUPS = 200;
const MAX_EXAMPLES = 6;

/** Groups of a run, the one with most bad trajectories first. */
function badGroups({ trajectories }, kind) {
  const groups = new Map();
  const { reward, step } = trajectories.columns;
  trajectories.columns[kind].forEach((code, row) => {
    if (!groups.has(code)) groups.set(code, { code, all: 0, bad: 0, sum: 0, scored: 0, examples: [], first: Infinity, last: -Infinity });
    const group = groups.get(code);
    group.all++;
    if (!Number.isNaN(reward[row])) {
      group.scored++;
      group.sum += reward[row];
    }
    if (!trajectories.isBad(row)) return;
    group.bad++;
    group.first = Math.min(group.first, step[row]);
    group.last = Math.max(group.last, step[row]);
    group.examples.push(row);
    if (group.examples.length > MAX_EXAMPLES * 2) group.examples.splice(0, MAX_EXAMPLES); // the newest tell most
  });
  return [...groups.values()].filter(({ bad }) => bad).sort((one, other) => other.bad - one.bad);
}

function badTable(runs, number_, kind) {
  const run = runs[number_];
  const groups = badGroups(run, kind);
  if (!groups.length) return make("p", { class: "muted" }, `${run.header.name}: no recorded trajectory failed or scored below ${BAD_BELOW}.`);
  const rows = groups.slice(0, MAX_GROUPS).map((group) => {
    const name = run.trajectories.names[kind][group.code] || "not failed";
    const key = kind === "failure" ? (group.code ? `=${name}` : "none") : name;
    const filters = { view: "rollouts", run: number_, [kind]: key, sort: "newest", r1: kind === "failure" && group.code ? "" : "0.4999" };
    const examples = group.examples.slice(-MAX_EXAMPLES).reverse().map((row) =>
      make("a", { class: "score bad", href: viewState.link({ ...filters, row }, { isFresh: true }), title: run.trajectories.name("problem", row) },
        `step ${run.trajectories.columns.step[row]}`));
    return [
      make("a", { href: viewState.link(filters, { isFresh: true }) }, snippet(name, 90)),
      group.bad.toLocaleString("en"), percent(group.bad / group.all), number(group.sum / group.scored),
      `${group.first} to ${group.last}`, make("span", { class: "chips" }, examples),
    ];
  });
  const all = groups.reduce((sum, { bad }) => sum + bad, 0);
  const more = groups.length > MAX_GROUPS ? `; the ${MAX_GROUPS} largest groups of ${groups.length}` : "";
  const caption = `${run.header.name}: ${plural(all, "worst case")} (failed, or scored below ${BAD_BELOW})${more}`;
  return makeTable(caption, [GROUPINGS[kind], ["worst cases", "number"], ["of the group", "number"], ["mean reward", "number"], "steps", "newest"], rows);
}

const worstView = {
  id: "worst",
  title: "Worst cases",
  isThere: (runs) => runs.some(({ trajectories }) => trajectories.count),
  render(place, runs) {
    const kind = GROUPINGS[viewState.get("group")] ? viewState.get("group") : "source";
    const choice = makeSelect("Group by", Object.entries(GROUPINGS), kind, (value) => viewState.set({ group: value }));
    const tables = runs.map((_, number_) => badTable(runs, number_, kind));
    place.replaceChildren(make("div", { class: "bar" }, labelled("Group by", choice)), ...tables);
  },
};
