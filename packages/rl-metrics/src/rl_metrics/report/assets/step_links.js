"use strict";
// Links from a step of a chart to the run's data at that step.

/** The nearest step in a column; undefined if it is empty. */
function nearestStep(steps, wanted) {
  return steps.reduce((best, one) => (best === undefined || Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), undefined);
}

/** "Step 12: rollouts, validation, time" as links, for each run. */
function stepLinks(step) {
  const several = page.runs.length > 1;
  const links = page.runs.flatMap((run, place) => {
    const link = (near, what, state) => {
      if (near === undefined) return [];
      const text = `${what}${near === step ? "" : ` of step ${near}`}${several ? ` of ${run.header.name}` : ""}`;
      return [" · ", make("a", { href: viewState.link({ ...state(near), run: place }, { isFresh: true }) }, text)];
    };
    return [
      ...link(nearestStep(run.trajectories.columns.step, step), "rollouts", (near) => ({ view: "rollouts", s0: near, s1: near })),
      ...link(nearestStep(run.generations.columns.step, step), "validation", (near) => ({ view: "validation", vstep: near })),
      ...link(viewState.get("view") !== "times" && curveOf(run, "timing_s/step") ? step : undefined, "time", () => ({ view: "times", at: step })),
    ];
  });
  return links.length ? [`Step ${step}`, ...links] : [`Step ${step}: the run recorded only metrics.`];
}

/** Show the links of a chosen step below a chart. */
function showStepLinks(place, step) {
  place.querySelector(".at")?.remove();
  place.append(make("p", { class: "at", role: "status" }, stepLinks(step)));
}
