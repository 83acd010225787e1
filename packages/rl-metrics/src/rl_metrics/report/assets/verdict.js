"use strict";
// Whether a run is healthy: the verdict on top of the page, and the checklist.

const SIDES = { task: "Task", convergence: "Convergence", stability: "Stability", efficiency: "Efficiency" };
const SIGNS = { ok: "✓", warning: "!", critical: "✗", unknown: "?" };
const WORDS = { ok: "healthy", warning: "warnings", critical: "sick", unknown: "too early to say" };

const STATUSES = Object.keys(SIGNS);

function statusBadge(status) {
  const known = STATUSES.includes(status) ? status : "unknown";
  return make("span", { class: `badge ${known}`, role: "img", "aria-label": known }, SIGNS[known]);
}

function showVerdicts(runs) {
  const lines = runs.map((run, place) => {
    const { verdict, header } = { verdict: run.header.verdict, header: run.header };
    const state = header.is_finished ? "finished" : "not finished";
    const worst = verdict.findings.map((finding) => finding.what).join(" ");
    return make(
      "p",
      { class: `verdict ${STATUSES.includes(verdict.status) ? verdict.status : "unknown"}` },
      statusBadge(verdict.status),
      runs.length > 1 ? make("span", { class: `swatch run-${place % 7}` }) : null,
      make("strong", {}, header.name),
      ` ${WORDS[verdict.status] ?? verdict.status} at step ${verdict.step}; ${state}, ${plural(header.steps, "step")}. `,
      make("span", { class: "muted" }, snippet(worst, 300)),
    );
  });
  byId("verdicts").replaceChildren(...lines);
}

function checkItem(check) {
  const title = [statusBadge(check.status), make("strong", {}, check.title), " ", check.reading];
  if (!check.finding) return make("li", { class: "check" }, title);
  return make("li", { class: "check" }, make("details", { open: true }, make("summary", {}, title), finding(check.finding)));
}

function finding({ what, since_step: since, evidence, causes, advice }) {
  const list = (kind, heading, items) =>
    items.length ? [make("h5", {}, heading), make(kind, {}, items.map((item) => make("li", {}, item)))] : [];
  const shown = evidence.map(({ metric, text }) => [
    make("a", { href: viewState.link({ view: "curves", chart: metric }) }, metric), `: ${text}`,
  ]);
  return make(
    "div",
    { class: "finding" },
    make("p", {}, `${what} Since step ${since}.`),
    list("ul", "Evidence", shown),
    list("ol", "Likely causes, the likeliest first", causes),
    list("ol", "What to try", advice),
  );
}

const OVERVIEW = [
  /^critic\/score\/mean$/, /^val-core\//, /^actor\/entropy$/, /^actor\/(ppo_kl|kl_loss|reference_kl)$/,
  /^actor\/grad_norm$/, /^response_length\/mean$/, /^training\/rollout_probs_diff_mean$/, /^timing_s\/step$/,
];

const healthView = {
  id: "health",
  title: "Health",
  render(place, runs) {
    const lists = runs.map(({ header }) => {
      const sides = Object.entries(SIDES).map(([side, title]) => {
        const checks = header.verdict.checks.filter((check) => check.side === side);
        if (!checks.length) return null;
        return make("section", { class: "side" }, make("h3", {}, title), make("ul", {}, checks.map(checkItem)));
      });
      return make("section", { class: "checklist" }, make("h2", {}, runs.length > 1 ? header.name : "Checklist"), sides);
    });
    const names = OVERVIEW.flatMap((pattern) => metricNames(runs).filter((name) => pattern.test(name)));
    const charts = make("div", { class: "cards" }, names.map((name) => metricCard(runs, name)));
    place.replaceChildren(make("div", { class: "checklists" }, lists), make("h2", {}, "Overview"), charts);
  },
};
