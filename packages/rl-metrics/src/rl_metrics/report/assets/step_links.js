"use strict";
// From a step of a chart to what the run did then.

/** The step among those of a column that is nearest to one; undefined where there is none. */
function nearestStep(steps, wanted) {
  return steps.reduce((best, one) => (best === undefined || Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), undefined);
}

/** "Step 12: rollouts, validation, time", each a link; of each run where there are several. */
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
  return links.length ? [`Step ${step}`, ...links] : [`Step ${step}: the run recorded nothing but its metrics.`];
}

/** Below a chart, once a step was chosen. */
function showStepLinks(place, step) {
  place.querySelector(".at")?.remove();
  place.append(make("p", { class: "at", role: "status" }, stepLinks(step)));
}
