"use strict";
// The outcome on one screen: the training, its results, the use of time, and what to look at next.

const PHASE_NAMES = {
  gen: "generation", wait_rollouts: "waiting for rollouts", old_log_prob: "old logprobs", ref: "reference logprobs", adv: "advantages",
  update_actor: "policy update", update_critic: "critic update", update_weights: "weight update", teacher: "waiting for teachers",
  testing: "validation", save_checkpoint: "checkpoints", dump_rollout_generations: "recording", rest: "start, end, untimed",
};
const UNTIMED_SHARE = 0.01;
const MAX_NEXT = 3;
const MAX_CHARTS = 2;
const LARGE_SHARE = 0.25; // of the time
const MAX_DIFFERENCES = 12;

/** Three significant digits, the accuracy of such figures. */
function rough(value) {
  return number(value === null ? null : Number(value.toPrecision(3)));
}

function signed(value) {
  return `${value < 0 ? "−" : "+"}${rough(Math.abs(value))}`;
}

function bracket(low, high) {
  return `[${low},\u00a0${high}]`;
}

function estimateText({ interval: { low, high }, steps: [from, to] }) {
  const range = low === null ? "" : ` ${bracket(rough(low), rough(high))}`;
  return `${from === to ? `step ${from}` : `steps ${from} to ${to}`}${range}`;
}

/** A metric's first and last value, with a link to its curve. */
function figureTile({ label, metric, is_up_better: isUpBetter, first, last, change }) {
  const name = make("a", { href: viewState.link({ view: "curves", chart: metric }, { isFresh: true }) }, capital(label.replace(/^the /, "")));
  if (!first) return tile(name, rough(last.value), estimateText(last));
  const by = last.value - first.value;
  const isClear = change.low !== null && (change.low > 0 || change.high < 0);
  const kind = isClear ? ((by > 0) === isUpBetter ? "good" : "bad") : "none";
  const range = change.low === null ? "no interval" : `${bracket(signed(change.low), signed(change.high))}${isClear ? "" : ", not clear"}`;
  return tile(
    name, `${rough(first.value)} → ${rough(last.value)}`,
    make("span", { class: `score ${kind}` }, `${by > 0 ? "▲" : by < 0 ? "▼" : "="} ${signed(by)}`), ` ${range}`,
    make("div", {}, estimateText(first)), make("div", {}, estimateText(last)),
  );
}

function tile(name, value, ...note) {
  return make("li", { class: "tile" }, make("div", { class: "what" }, name), make("div", { class: "big" }, value), make("div", { class: "note" }, note));
}

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

function speedTiles({ outcome, steps }) {
  const { wall_s: wall, step_s: step, num_samples: samples, samples_per_s: speed } = outcome;
  return [
    wall === null ? null : tile("Wall time", seconds(wall), plural(steps, "step"), step === null ? "" : `, ${seconds(step)} per step`),
    speed === null ? null : tile("Samples per second", rough(speed), samples === null ? "" : plural(samples, "sample")),
  ];
}

/** Seconds of all steps by phase, of work outside the steps, and of untimed work. */
function timesOf(run) {
  const phases = phasesOf(run).map(({ name, total }, index) => ({ name, time: total, index }));
  for (const name of BESIDE) {
    const curve = curveOf(run, `timing_s/${name}`);
    const time = curve ? curve.y.reduce((sum, one) => sum + one, 0) : 0;
    if (time > 0) phases.push({ name, time, index: phases.length });
  }
  const { wall_s: wall } = run.header.outcome;
  const rest = wall - phases.reduce((sum, { time }) => sum + time, 0);
  if (phases.length && rest > wall * UNTIMED_SHARE) phases.push({ name: "rest", time: rest, index: phases.length });
  return phases.map((phase) => ({ ...phase, name: PHASE_NAMES[phase.name] ?? phase.name })).sort((one, other) => other.time - one.time);
}

function timeParts(times) {
  if (!times.length) return null;
  const sum = times.reduce((all, { time }) => all + time, 0);
  const shares = times.filter(({ time }) => time / sum >= 0.005).map(({ name, index, time }) => {
    const swatch = make("span", { class: "swatch tall" });
    swatch.style.backgroundColor = cssColor(`--phase-${index % 12}`);
    return make("li", {}, swatch, `${name} ${seconds(time)} (${percent(Number((time / sum).toPrecision(2)))})`);
  });
  return make("section", {}, make("h3", {}, "Where the time went"), make("div", { class: "timeline" }, times.map((part) => timelinePart(part, sum))), make("ul", { class: "legend" }, shares));
}

/** What to look at, most severe first: [text, state of its view]. */
function nextLooks(run, place, times) {
  const { outcome, verdict, steps } = run.header;
  const { figures, state } = outcome;
  const looks = verdict.findings.slice(0, 1).map(({ what, advice, evidence }) => [
    `${what}${advice.length ? ` Try: ${advice[0]}.` : ""}`, evidence.length ? { view: "curves", chart: evidence[0].metric } : { view: "outcome" },
  ]);
  if (state === "failed" || state === "stopped") looks.push([`See the events before it ${state === "failed" ? "failed" : "was stopped"}.`, { view: "run" }]);
  for (const { metric, label, still, is_up_better: isUpBetter } of figures) {
    if (still && still > 0 === isUpBetter && state === "finished") looks.push([`${capital(label)} still ${still > 0 ? "rises" : "falls"} at the end; more steps may help.`, { view: "curves", chart: metric }]);
  }
  if (steps && outcome.trained.length && !figures.some((one) => one.is_validation)) looks.push(["The run has no validation: set prompts.validation to see progress on held-out problems.", { view: "run" }]);
  const bad = badOfNewest(run.trajectories);
  if (bad.count) looks.push([`Read the ${bad.count} of ${plural(bad.all, "recorded rollout")} of step ${bad.step} that failed or scored below ${BAD_BELOW}.`, { view: "rollouts", run: place, worst: "any", s0: bad.step, s1: bad.step }]);
  const sum = times.reduce((all, { time }) => all + time, 0);
  const [longest] = times.filter(({ name }) => name !== PHASE_NAMES.rest);
  if (longest?.time > sum * LARGE_SHARE) looks.push([`${capital(longest.name)} takes ${percent(Number((longest.time / sum).toPrecision(2)))} of the time; see it step by step.`, { view: "times" }]);
  return looks.slice(0, MAX_NEXT);
}

/** Number of recorded trajectories and of worst cases at the newest step that has any. */
function badOfNewest(trajectories) {
  const { step } = trajectories.columns;
  const newest = step.at(-1);
  const rows = [...step.keys()].filter((row) => step[row] === newest);
  return { step: newest, all: rows.length, count: rows.filter((row) => trajectories.isBad(row)).length };
}

function outcomeSection(runs, place) {
  const run = runs[place];
  const { name, outcome } = run.header;
  const times = timesOf(run);
  const trained = outcome.trained.map(([what, value]) => make("div", {}, make("dt", {}, what), make("dd", {}, value)));
  const looks = nextLooks(run, place, times).map(([text, state]) => make("li", {}, make("a", { href: viewState.link(state, { isFresh: true }) }, text)));
  return make(
    "section", { class: "outcome" },
    runs.length > 1 ? make("h2", {}, make("span", { class: `swatch run-${place % 7}` }), name) : null,
    make(runs.length > 1 ? "p" : "h2", { class: "sentence" }, outcome.sentence),
    trained.length ? make("dl", { class: "facts wide" }, trained) : make("p", { class: "muted" }, "The training is unknown, because the run has no settings.toml."),
    make("ul", { class: "tiles" }, outcome.figures.map(figureTile), speedTiles(run.header)),
    make("div", { class: "beside" },
      looks.length ? make("section", { class: "next" }, make("h3", {}, "Look at next"), make("ol", {}, looks)) : null,
      timeParts(times)),
  );
}

/** A note on the methods of the intervals. */
function intervalNote(figures) {
  const hows = new Map();
  for (const { last: { how }, label } of figures) hows.set(how, (hows.get(how) ?? new Set()).add(label.replace(/^the /, "")));
  const said = [...hows].map(([how, labels]) => ` ${capital([...labels].join(", "))}: ${how}.`);
  return make("p", { class: "note small" }, said.length ? "Brackets show 95 % intervals." : "", said);
}

/** Settings in which runs differ, except their names; null without any. */
function differingSettings(runs) {
  const known = runs.map(({ header }) => new Map(header.settings));
  const names = [...new Set(known.flatMap((of) => [...of.keys()]))].filter((name) => name !== "run.name" && new Set(known.map((of) => of.get(name))).size > 1);
  if (!names.length) return null;
  const rows = names.slice(0, MAX_DIFFERENCES).map((name) => [name, ...known.map((of) => of.get(name) ?? "–")]);
  const more = names.length > MAX_DIFFERENCES ? `; ${names.length - MAX_DIFFERENCES} more in Run` : "";
  return makeTable(`Settings that differ${more}`, ["setting", ...runs.map(({ header }) => header.name)], rows);
}

const outcomeView = {
  id: "outcome",
  title: "Outcome",
  render(place, runs) {
    const hangs = runs.map((run) => hangSection(run, runs.length > 1)).filter(Boolean);
    const figures = runs.flatMap(({ header }) => header.outcome.figures);
    const charted = [false, true].flatMap((kind) => figures.filter((one) => one.is_validation === kind && one.first).slice(0, 1));
    const known = [...chaptersOf(runs).values()].flatMap((of) => [...of]).filter((name) => !standsStill(runs, name));
    const others = MAIN.flatMap((pattern) => known.filter((name) => pattern.test(name)));
    const names = [...new Set([...charted.map(({ metric }) => metric), ...others])].slice(0, MAX_CHARTS);
    const health = runs.map(({ header }) =>
      make("section", { class: "checked" }, make("h2", {}, runs.length > 1 ? `Health of ${header.name}` : "Health"), findingList(header), stabilityTable(header), checkFold(header)));
    place.replaceChildren(
      ...hangs,
      make("div", { class: "outcomes" }, runs.map((_, number_) => outcomeSection(runs, number_))),
      intervalNote(figures),
      make("div", { class: "cards large" }, names.map((name) => metricCard(runs, name))),
      ...[differingSettings(runs)].filter(Boolean),
      make("div", { class: "checklists" }, health),
    );
  },
};
