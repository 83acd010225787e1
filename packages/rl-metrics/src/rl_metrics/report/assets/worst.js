"use strict";
// Worst cases: trajectories, or samples of validations, that failed or scored below 0.5, grouped.

const GROUPINGS = { source: "source", finish: "finish", failure: "failure", problem: "problem", part: "part of the reward" };
const CASES = { training: "responses in training", validation: "responses in validations" };
const MAX_GROUPS = 200;
const MAX_EXAMPLES = 3;

/** The kind of cases to group, and those of a run. */
const chosenCases = () => viewState.key("of", CASES, "training");
const casesOf = (run) => (chosenCases() === "validation" ? run.generations : run.trajectories);

/** Codes of a trajectory's groups; for parts of the reward, those that are low. */
function groupsOf(trajectories, kind) {
  if (kind !== "part") return (row) => [trajectories.columns[kind][row]];
  const values = trajectories.parts.map((name) => trajectories.part(name));
  return (row) => [...values.keys()].filter((code) => values[code][row] < BAD_BELOW);
}

/** Groups of a run, ordered by the number of bad trajectories, largest first. */
function badGroups(trajectories, kind) {
  const groups = new Map();
  const codes = groupsOf(trajectories, kind);
  for (let row = 0; row < trajectories.count; row++) for (const code of codes(row)) countIn(groups, code, trajectories, row);
  return [...groups.values()].filter(({ bad }) => bad).sort((one, other) => other.bad - one.bad);
}

function countIn(groups, code, trajectories, row) {
  const { scores: reward, columns: { step } } = trajectories;
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
  if (group.examples.length > MAX_EXAMPLES * 2) group.examples.splice(0, MAX_EXAMPLES); // keep the newest
}

function badExample(trajectories, row, filters) {
  const told = `${trajectories.asked(row)}${trajectories.responses ? ` → ${trajectories.responses[row] || "∅"}` : ""}`;
  const own = filters.view === "rollouts" ? { row } : { vstep: trajectories.columns.step[row], vproblem: "" };
  const link = make("a", { href: viewState.link({ ...filters, ...own }, { isFresh: true }) }, `step ${trajectories.columns.step[row]}`);
  return make("div", {}, link, ` ${told}`);
}

/** The share of worst cases of each step, with runs overlaid. */
function badCard(runs) {
  const curves = runs.map(casesOf).map((trajectories) => {
    const counts = new Map();
    trajectories.columns.step.forEach((step, row) => {
      const [bad, all] = counts.get(step) ?? [0, 0];
      counts.set(step, [bad + trajectories.isBad(row), all + 1]);
    });
    const steps = [...counts.keys()].sort((one, other) => one - other);
    return [steps, steps.map((step) => counts.get(step)[0] / counts.get(step)[1])];
  });
  const newest = runs.map(({ header }, place) => `${header.name} ${percent(curves[place][1].at(-1) ?? NaN)}`).join(", ");
  const isSampled = runs.map(casesOf).some((trajectories) => trajectories.recorded > trajectories.count);
  const sampled = isSampled ? " The report has a sample that keeps the worst, so their share is larger." : "";
  const note = make("p", { class: "note" }, `Share of the recorded responses of each step. Newest: ${newest}.${sampled}`);
  return chartCard("Share of worst cases", note, `Share of worst cases by step. Newest: ${newest}.`, (place, width) => {
    const series = runs.map(({ header }, number_) => ({ label: header.name, stroke: runColor(number_), value: (_, value) => percent(value ?? NaN) }));
    return stepChart(place, width, joined(curves), series, { y: { range: [0, 1] } });
  });
}

function badTable(runs, number_, kind) {
  const run = runs[number_];
  const cases = casesOf(run);
  const groups = badGroups(cases, kind);
  if (!groups.length) return make("p", { class: "muted" }, `${run.header.name}: no recorded response in such a group failed or scored below ${BAD_BELOW}.`);
  const rows = groups.slice(0, MAX_GROUPS).map((group) => {
    const name = kind === "failure" && !group.code ? "not failed" : (cases.names[kind] ?? cases.parts)[group.code];
    const asked = kind === "problem" ? cases.prompts[group.code] : "";
    const key = { failure: group.code ? `=${name}` : "none", problem: `=${name}` }[kind] ?? name;
    const ofTraining = { view: "rollouts", run: number_, [kind]: key, worst: kind === "part" ? "part" : "any", sort: "newest" };
    const ofValidation = { view: "validation", run: number_, vstep: "all", vsort: "worst", [`v${kind}`]: kind === "failure" && !group.code ? "none" : name };
    const filters = chosenCases() === "validation" ? ofValidation : ofTraining;
    const examples = group.examples.slice(-MAX_EXAMPLES).reverse().map((row) => badExample(cases, row, filters));
    return [
      make("a", { href: viewState.link(filters, { isFresh: true }) }, asked || snippet(name, 90)),
      group.bad.toLocaleString("en"), percent(group.bad / group.all), number(group.sum / group.scored),
      group.first === group.last ? group.first : `${group.first} to ${group.last}`, examples,
    ];
  });
  const all = [...Array(cases.count).keys()].filter((row) => cases.isBad(row)).length;
  const more = groups.length > MAX_GROUPS ? `; the ${MAX_GROUPS} largest groups of ${groups.length}` : "";
  const caption = `${run.header.name}: ${plural(all, "worst case")} (failed, or scored below ${BAD_BELOW})${more}`;
  return makeTable(caption, [GROUPINGS[kind], ["worst cases", "number"], ["share of group", "number"], ["mean reward", "number"], "steps", ["newest", "long"]], rows);
}

const worstView = {
  id: "worst",
  title: "Worst cases",
  isThere: (runs) => runs.some(({ trajectories, generations }) => trajectories.count + generations.count),
  render(place, runs) {
    const kind = viewState.key("group", GROUPINGS, "source");
    const kinds = Object.entries(GROUPINGS).filter(([name]) => name !== "part" || runs.some((run) => casesOf(run).parts.length));
    const choice = makeSelect("Group by", kinds, kind, (value) => viewState.set({ group: value }));
    const of = makeSelect("Of", Object.entries(CASES), chosenCases(), (value) => viewState.set({ of: value }));
    const tables = runs.map((_, number_) => badTable(runs, number_, kind));
    place.replaceChildren(make("div", { class: "bar" }, labelled("Of", of), labelled("Group by", choice)), make("div", { class: "wide cards" }, badCard(runs)), ...tables);
  },
};
