"use strict";
// Times of the phases of each step, and the slowest samples.

const PHASE = /^timing_s\/[^/]+$/;
const NO_PHASE = /^timing_s\/(step|load_rollouts|replayed_gen|reward|reward_wait)$/; // the total, parts of gen, a session's mean
const BESIDE = ["testing", "save_checkpoint"]; // not in the time of the step
const MAX_PHASES = 12;

/** Phases of the steps of a run, longest first: [{name, of: Map(step -> seconds), total}]. */
function phasesOf(run) {
  const phases = run.header.curves
    .filter(({ name }) => PHASE.test(name) && !NO_PHASE.test(name) && !BESIDE.includes(phaseName(name)) && curveOf(run, name))
    .map(({ name }) => {
      const { x, y } = curveOf(run, name);
      const of = new Map();
      let total = 0;
      x.forEach((step, place) => of.set(step, y[place]) && (total += y[place]));
      return { name: phaseName(name), of, total };
    });
  phases.sort((one, other) => other.total - one.total);
  const rest = phases.splice(MAX_PHASES);
  return rest.reduce((kept, phase) => {
    kept.at(-1).name += `, ${phase.name}`;
    for (const [step, time] of phase.of) kept.at(-1).of.set(step, (kept.at(-1).of.get(step) ?? 0) + time);
    return kept;
  }, phases);
}

function phaseName(metric) {
  return metric.slice("timing_s/".length);
}

/** "Outside the step: testing 3 s", for work not in the step's time; "" without any. */
function besideStep(run, step) {
  const known = BESIDE.map((name) => [name, curveOf(run, `timing_s/${name}`)]).filter(([, curve]) => curve);
  const times = known.map(([name, { x, y }]) => [name, y[x.indexOf(step)]]).filter(([, time]) => time > 0);
  return times.length ? ` Outside the step: ${times.map(([name, time]) => `${name} ${seconds(time)}`).join(", ")}.` : "";
}

const STAIRS = uPlot.paths.stepped({ align: -1 });

/** Stacked phases: the k-th curve is the sum of the first k. */
function phaseCard(run, phases) {
  const whole = curveOf(run, "timing_s/step");
  const known = whole?.x ?? curveOf(run, `timing_s/${phases[0].name}`).x;
  const steps = [known[0] - 1, ...known]; // a stair goes from the previous step to its own
  const sums = [];
  for (const { of } of phases) {
    const below = sums.at(-1);
    const time = (place) => of.get(steps[place || 1]) ?? 0;
    sums.push(Float32Array.from(steps, (_, place) => (below ? below[place] : 0) + time(place)));
  }
  const total = phases.reduce((sum, phase) => sum + phase.total, 0);
  const shares = phases.map((phase) => `${phase.name} ${percent(phase.total / total)}`).join(", ");
  const note = make("p", { class: "note" }, `Of the phases' time: ${shares}. Concurrent phases add up to more than the step; validation and checkpoints are outside it. Click a step to see its timeline.`);
  return chartCard(`Phases of the steps · ${run.header.name}`, note, `Phases of the steps. ${shares}`, (place, width) => {
    const fill = (index) => cssColor(`--phase-${index % 12}`);
    const series = phases
      .map((phase, index) => ({
        label: phase.name, stroke: fill(index), fill: fill(index), width: 0.5, points: { show: false }, paths: STAIRS,
        value: (_, value, __, at) => (at === null ? "–" : seconds(phase.of.get(steps[at]) ?? 0)),
      }))
      .reverse(); // the highest sum first, so that lower ones are drawn over it
    const data = [steps, ...[...sums].reverse()];
    if (whole) {
      series.push({ label: "complete step", stroke: cssColor("--text"), width: 1, points: { show: false }, paths: STAIRS, value: (_, value) => seconds(value) });
      data.push([whole.y[0], ...whole.y]);
    }
    const choose = (step) => viewState.set({ at: step });
    return stepChart(place, width, data, series, { choose, y: { range: (_, low, high) => [0, high || 1] } });
  });
}

function slowestEvents(run, place) {
  const sessions = run.header.slowest.slice(0, 25);
  if (!sessions.length) return null;
  const rows = sessions.map((session) => [
    session.step ?? "–", seconds(session.total_s), seconds(session.generate_s ?? 0), seconds(session.tools_s ?? 0),
    seconds(session.reward_s ?? 0), session.prompt_tokens ?? "–", session.response_tokens ?? "–",
    session.preemptions ?? "–",
    session.row === undefined
      ? (session.prompt_uid ?? "–")
      : make("a", { href: viewState.link({ view: "rollouts", run: place, row: session.row }, { isFresh: true }) }, run.trajectories.asked(session.row)),
  ]);
  const numbers = ["step", "total", "generation", "tools", "reward", "prompt tokens", "response tokens", "preemptions"];
  const title = `Slowest sessions of ${run.header.name}, with links to recorded trajectories`;
  return makeTable(title, [...numbers.map((name) => [name, "number"]), "problem or group"], rows);
}

function slowestTrajectories(run, place) {
  const { seconds: times, step, length, reward } = run.trajectories.columns;
  const order = [...times.keys()].filter((row) => times[row] > 0).sort((one, other) => times[other] - times[one]);
  if (!order.length) return null;
  const rows = order.slice(0, 25).map((row) => [
    step[row], seconds(times[row]), length[row], number(reward[row]),
    make("a", { href: viewState.link({ view: "rollouts", run: place, row }, { isFresh: true }) }, run.trajectories.asked(row)),
    run.trajectories.responses[row],
  ]);
  const headings = [["step", "number"], ["total", "number"], ["tokens", "number"], ["reward", "number"], "problem", "response"];
  return makeTable(`Slowest recorded trajectories of ${run.header.name}`, headings, rows);
}

const timesView = {
  id: "times",
  title: "Time",
  render(place, runs) {
    const charts = runs
      .map((run) => [run, phasesOf(run)])
      .filter(([, phases]) => phases.length)
      .flatMap(([run, phases]) => [phaseCard(run, phases), stepTimeline(run, phases)]);
    const tables = runs.flatMap((run, number_) => [slowestEvents(run, number_), slowestTrajectories(run, number_)]).filter(Boolean);
    const none = charts.length || tables.length ? null : make("p", { class: "muted" }, "The run recorded no times.");
    place.replaceChildren(make("div", { class: "wide cards" }, charts), ...tables, none ?? "");
  },
};
