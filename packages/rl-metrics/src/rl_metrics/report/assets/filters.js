"use strict";
// Filters and order of the listed trajectories.

const SORTS = {
  "": ["by step", null],
  newest: ["newest first", "step", -1],
  worst: ["lowest reward first", "reward", 1],
  longest: ["longest first", "length", -1],
  slowest: ["slowest first", "seconds", -1],
  mismatch: ["largest mismatch first", "mismatch", -1],
  entropy: ["highest entropy first", "entropy", -1],
  stale: ["stalest first", "staleness", -1],
};

const WORST = {
  "": "all",
  any: `failed or below ${BAD_BELOW}`,
  part: `the same, and that part below ${BAD_BELOW}`,
};

const FILTERS = ["s0", "s1", "r0", "r1", "worst", "part", "p0", "p1", "source", "finish", "failure", "problem", "sort", "q"];

/** Rows that match the filters in the URL, except the text search. */
function matchingRows(trajectories) {
  const { step, reward, source, finish, failure, problem } = trajectories.columns;
  const code = (kind) => (viewState.get(kind) === "" ? null : trajectories.names[kind].indexOf(viewState.get(kind)));
  const [firstStep, lastStep] = [viewState.number("s0", -Infinity), viewState.number("s1", Infinity)];
  const inReward = viewState.range("r0", "r1");
  const isWorst = worstFilter(trajectories);
  const [ofSource, ofFinish, failed] = [code("source"), code("finish"), failureFilter(trajectories)];
  const problems = problemFilter(trajectories);
  const inPart = partFilter(trajectories);
  const rows = [];
  for (let row = 0; row < trajectories.count; row++) {
    if (step[row] < firstStep || step[row] > lastStep) continue;
    if (inReward && !inReward(reward[row])) continue;
    if (isWorst && !isWorst(row)) continue;
    if (inPart && !inPart(row)) continue;
    if (ofSource !== null && source[row] !== ofSource) continue;
    if (ofFinish !== null && finish[row] !== ofFinish) continue;
    if (failed && !failed(failure[row])) continue;
    if (problems && !problems[problem[row]]) continue;
    rows.push(row);
  }
  return sortedRows(trajectories, rows);
}

function failureFilter(trajectories) {
  const wanted = viewState.get("failure");
  if (wanted === "") return null;
  if (wanted === "any") return (code) => code > 0;
  if (wanted === "none") return (code) => code === 0;
  const of = trajectories.names.failure.indexOf(wanted.replace(/^=/, ""));
  return (code) => code === of;
}

/** Whether a row failed or scored low, and, if requested, the chosen part of the reward is low too. */
function worstFilter(trajectories) {
  const wanted = viewState.key("worst", WORST);
  if (wanted === "") return null;
  const values = wanted === "part" ? trajectories.part(viewState.get("part")) : undefined;
  return (row) => trajectories.isBad(row) && (!values || values[row] < BAD_BELOW);
}

/** Whether a part of the reward is in the chosen range. */
function partFilter(trajectories) {
  const values = trajectories.part(viewState.get("part"));
  const isIn = viewState.range("p0", "p1");
  return values && isIn ? (row) => isIn(values[row]) : null;
}

/** By code of a problem, whether its name contains the wanted text, or equals it after "=". */
function problemFilter(trajectories) {
  const wanted = viewState.get("problem");
  const { problem } = trajectories.names;
  if (wanted === "") return null;
  if (wanted.startsWith("=")) return problem.map((name) => name === wanted.slice(1));
  const text = wanted.toLowerCase();
  return problem.map((name) => name.toLowerCase().includes(text));
}

function sortedRows(trajectories, rows) {
  const [, name, direction] = SORTS[viewState.key("sort", SORTS)];
  if (!name) return rows;
  const values = trajectories.columns[name];
  const worth = (row) => (Number.isNaN(values[row]) ? Infinity : direction * values[row]);
  return rows.sort((one, other) => worth(one) - worth(other) || one - other);
}

/** An input for a part of the view's state; `set` receives its value when the reader pauses. */
function stateInput(name, properties, set) {
  const input = make("input", { name, ...properties });
  input.value = viewState.get(name);
  input.addEventListener("input", settled(() => set(input.value)));
  return input;
}

/** The form; `changed` is called when a filter changes. */
function filterForm(runs, trajectories, changed) {
  const set = (name) => (value) => {
    viewState.set({ [name]: value, row: "", ...NO_CHOICE }, { isQuiet: true });
    changed();
  };
  const field = (name, properties) => stateInput(name, properties, set(name));
  const choice = (name, label, all) => {
    const wanted = viewState.get(name);
    const known = wanted === "" || all.includes(wanted) ? all : [...all, wanted];
    const options = known.map((value) => [value, snippet(value, 60)]);
    return labelled(label, makeSelect(label, [["", name === "part" ? "none" : "all"], ...options], wanted, set(name)));
  };
  const { source, finish, failure } = trajectories.names;
  const failures = [["", "all"], ["none", "not failed"], ["any", "failed"]];
  for (const why of failure.slice(1, 100)) failures.push([`=${why}`, snippet(why, 60)]);
  const wantedFailure = viewState.get("failure");
  if (!failures.some(([key]) => key === wantedFailure)) failures.push([wantedFailure, snippet(wantedFailure.replace(/^=/, ""), 60)]);
  const range = (first, last, label, step) =>
    labelled(label, make("span", { class: "range" },
      field(first, { type: "number", step, "aria-label": `${label} from` }), "–",
      field(last, { type: "number", step, "aria-label": `${label} to` })));
  const worsts = Object.entries(WORST).filter(([key]) => key !== "part" || trajectories.parts.length);
  const sorts = Object.entries(SORTS).map(([key, [text]]) => [key, text]);
  return make(
    "form",
    { class: "filters", role: "search", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    runs.length > 1 ? runChoice(runs, runs.findIndex((run) => run.trajectories === trajectories)) : null,
    labelled("Text in prompt or response", field("q", { type: "search", id: "search", placeholder: "search" }), "grow"),
    labelled("Order", makeSelect("Order", sorts, viewState.get("sort"), set("sort"))),
    make("button", { type: "button", onclick: () => viewState.set({ ...noFilters(), row: "", ...NO_CHOICE }, { isStep: true }) }, "Clear"),
    moreFields([
      range("s0", "s1", "Steps", 1),
      range("r0", "r1", "Reward", "any"),
      labelled("Worst cases", makeSelect("Worst cases", worsts, viewState.get("worst"), set("worst"))),
      trajectories.parts.length ? choice("part", "Part of the reward", trajectories.parts) : null,
      trajectories.parts.length ? range("p0", "p1", "That part", "any") : null,
      source.length > 1 ? choice("source", "Source", source) : null,
      finish.length > 1 ? choice("finish", "Finish", finish) : null,
      failure.length > 1 ? labelled("Failure", makeSelect("Failure", failures, wantedFailure, set("failure"))) : null,
      labelled("Problem", field("problem", { type: "search", placeholder: "part of its name" })),
    ]),
  );
}

/** Foldable fields, open if there is room; folded, they show how many are used. */
function moreFields(fields) {
  const folded = foldable("filters", !isNarrow(), "more-fields", "", make("div", { class: "filters" }, fields));
  const tell = () => {
    const used = [...folded.querySelectorAll("input, select")].filter((one) => (one.options ? one.selectedIndex > 0 : one.value !== "")).length;
    folded.firstChild.textContent = `Filters${used ? `, ${used} used` : ""}`;
  };
  folded.addEventListener("toggle", tell);
  tell();
  return folded;
}

function noFilters() {
  return Object.fromEntries(FILTERS.map((name) => [name, ""]));
}

function runChoice(runs, chosen) {
  const options = runs.map(({ header }, place) => [String(place), header.name]);
  const select = (value) => viewState.set({ run: value, row: "", ...NO_CHOICE }, { isStep: true });
  return labelled("Run", makeSelect("Run", options, String(chosen), select));
}
