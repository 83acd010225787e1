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
    const { header } = run;
    const { verdict } = header;
    const hangs = hangInShort(header);
    const status = hangs ? "critical" : verdict.status;
    const state = header.is_finished ? "finished" : "not finished";
    return make(
      "p",
      { class: `verdict ${STATUSES.includes(status) ? status : "unknown"}` },
      statusBadge(status),
      runs.length > 1 ? make("span", { class: `swatch run-${place % 7}` }) : null,
      make("strong", {}, header.name),
      ` ${WORDS[verdict.status] ?? verdict.status} at step ${verdict.step}; ${state}, ${plural(header.steps, "step")}. `,
      hangs ? make("span", { class: "failure" }, snippet(hangs, 300), " ") : null,
      make("span", { class: "muted" }, snippet(inShort(verdict.findings), 300)),
    );
  });
  byId("verdicts").replaceChildren(...lines);
}

/** The gravest finding, its likeliest cause, and how many more there are. */
function inShort([gravest, ...more]) {
  if (!gravest) return "";
  const cause = gravest.causes.length ? ` Likeliest cause: ${gravest.causes[0]}.` : "";
  return `${gravest.what}${cause}${more.length ? ` ${plural(more.length, "more finding")}.` : ""}`;
}

function checkItem({ status, title, reading }) {
  return make("li", { class: "check" }, statusBadge(status), make("strong", {}, title), " ", reading);
}

/** The findings, what explains others first; the first one is unfolded. */
function findingList({ name, verdict: { findings } }) {
  if (!findings.length) return null;
  const items = findings.map((one, place) => foldable(`${one.rule}, ${name}`, place === 0, "finding", ...findingNodes(one)));
  return make("section", {}, make("h3", {}, "Findings, what explains others first"), items);
}

function findingNodes({ severity, what, since_step: since, evidence, causes, advice }) {
  const list = (kind, heading, items) =>
    items.length ? [make("h5", {}, heading), make(kind, {}, items.map((item) => make("li", {}, item)))] : [];
  const shown = evidence.map(({ metric, text }) => [
    make("a", { href: viewState.link({ view: "curves", chart: metric }, { isFresh: true }) }, metric),
    text.startsWith(`${metric} `) ? text.slice(metric.length) : `: ${text}`,
  ]);
  const tried = (one, what) => [one, what ? make("div", { class: "muted" }, `Try: ${what}`) : null];
  const cause = causes.length ? make("span", { class: "muted" }, ` Likeliest cause: ${causes[0]}.`) : null;
  return [
    [statusBadge(severity), make("strong", {}, what), ` Since step ${since}.`, cause],
    list("ul", "Evidence", shown),
    list("ol", "Likely causes, the likeliest first, and what to try", causes.map((one, at) => tried(one, advice[at]))),
  ];
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
        return make("section", { class: "side" }, make("h4", {}, title), make("ul", {}, checks.map(checkItem)));
      });
      return make(
        "section", { class: "checked" },
        runs.length > 1 ? make("h2", {}, header.name) : null,
        findingList(header),
        make("h3", {}, "Checklist"),
        make("div", { class: "checklist" }, sides),
      );
    });
    const names = OVERVIEW.flatMap((pattern) => metricNames(runs).filter((name) => pattern.test(name)));
    const charts = make("div", { class: "cards" }, names.map((name) => metricCard(runs, name)));
    const hangs = runs.map((run) => hangSection(run, runs.length > 1)).filter(Boolean);
    place.replaceChildren(...hangs, make("div", { class: "checklists" }, lists), make("h2", {}, "Overview"), charts);
  },
};
