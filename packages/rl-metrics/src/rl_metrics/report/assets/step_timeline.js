"use strict";
// One step, phase by phase, in a trainer's order.

const PHASE_ORDER = [
  "wait_rollouts", "gen", "old_log_prob", "ref", "teacher", "values", "adv", "update_critic", "update_actor", "update_weights",
  "dump_rollout_generations",
];
const LABELLED_SHARE = 0.07;

function phasePlace(name) {
  const place = PHASE_ORDER.indexOf(name.split(",")[0]);
  return place < 0 ? PHASE_ORDER.length : place;
}

/** The timeline of the step in the URL, or else of the newest. */
function stepTimeline(run, phases) {
  const steps = [...new Set(phases.flatMap(({ of }) => [...of.keys()]))].sort((one, other) => one - other);
  const wanted = viewState.number("at", steps.at(-1));
  const step = steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
  const parts = phases
    .map(({ name, of }, index) => ({ name, index, time: of.get(step) ?? 0 }))
    .filter(({ time }) => time > 0)
    .sort((one, other) => phasePlace(one.name) - phasePlace(other.name));
  const sum = parts.reduce((all, { time }) => all + time, 0);
  const bar = make("div", { class: "timeline" }, parts.map((part) => timelinePart(part, sum)));
  const curve = curveOf(run, "timing_s/step");
  const whole = curve ? curve.y[curve.x.indexOf(step)] : undefined;
  const input = make("input", { name: "at", type: "number", min: steps[0], max: steps.at(-1), step: 1 });
  input.value = step;
  input.addEventListener("change", () => viewState.set({ at: input.value }));
  const times = parts.map(({ name, time }) => `${name} ${seconds(time)}`).join(", ");
  return make(
    "figure",
    { class: "card" },
    make("figcaption", {}, make("h3", {}, `Timeline of step ${step} · ${run.header.name}`),
      make("p", { class: "note" }, `${whole === undefined ? "" : `The step took ${seconds(whole)}. `}${times || "No phase was timed"}.${besideStep(run, step)}`)),
    labelled("Step", input),
    make("p", { class: "at" }, stepLinks(step)),
    bar,
  );
}

function timelinePart({ name, index, time }, sum) {
  const label = time / sum > LABELLED_SHARE ? `${name} ${seconds(time)}` : "";
  const part = make("span", { class: "phase", title: visible(`${name}: ${seconds(time)}, ${percent(time / sum)}`) }, label);
  part.style.flexGrow = String(time / sum);
  part.style.backgroundColor = cssColor(`--phase-${index % 12}`);
  return part;
}
