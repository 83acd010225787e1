"use strict";
// A run's health: the verdict at the top of the page, findings, and the checklist.

const SIDES = { task: "Task", convergence: "Convergence", stability: "Stability", efficiency: "Efficiency" };
const SIGNS = { ok: "✓", warning: "!", critical: "✗", unknown: "?" };
const WORDS = { ok: "healthy", warning: "warnings", critical: "sick", unknown: "too early to say" };

const ENOUGH_SHARE = 0.25; // minimum share of passing checks to call a run healthy
const ENDINGS = { finished: "finished", stopped: "stopped", failed: "failed", open: "not finished", imported: "imported", unknown: "no ending recorded" };
const STATUSES = Object.keys(SIGNS);

function statusBadge(status) {
  const known = STATUSES.includes(status) ? status : "unknown";
  return make("span", { class: `badge ${known}`, role: "img", "aria-label": known }, SIGNS[known]);
}

/** The shown status: also "unknown" if nothing is wrong but few checks had enough data. */
function shownStatus({ status, checks }) {
  const passing = checks.filter((check) => check.status === "ok").length;
  return STATUSES.includes(status) && !(status === "ok" && passing < checks.length * ENOUGH_SHARE) ? status : "unknown";
}

function showVerdicts(runs) {
  const lines = runs.map((run, place) => {
    const { header } = run;
    const { verdict } = header;
    const hangs = hangInShort(header);
    const { state } = header.outcome;
    const status = hangs || state === "failed" ? "critical" : shownStatus(verdict);
    const health = `${WORDS[shownStatus(verdict)]} at step ${verdict.step}`;
    const ended = `${ENDINGS[state]}, ${plural(header.steps, "step")}`;
    return make(
      "p",
      { class: `verdict ${status}` },
      statusBadge(status),
      runs.length > 1 ? make("span", { class: `swatch run-${place % 7}` }) : null,
      runs.length > 1 ? make("strong", {}, `${header.name} `) : null,
      state === "failed" ? `${ended}; ${health}. ` : `${health}; ${ended}. `,
      hangs ? make("span", { class: "failure" }, snippet(hangs, 300), " ") : null,
      verdict.target ? make("span", {}, snippet(`T${verdict.target.text.slice(1)}. `, 300)) : null,
      make("span", { class: "muted" }, snippet(inShort(verdict.findings), 300)),
    );
  });
  byId("verdicts").replaceChildren(...lines);
}

/** The most severe finding, its most likely cause, and the number of others. */
function inShort([gravest, ...more]) {
  if (!gravest) return "";
  const cause = gravest.causes.length ? ` Most likely cause: ${gravest.causes[0]}.` : "";
  return `${gravest.what}${cause}${more.length ? ` ${plural(more.length, "more finding")}.` : ""}`;
}

function checkItem({ status, title, reading }) {
  return make("li", { class: "check" }, statusBadge(status), make("strong", {}, title), " ", reading);
}

/** The findings, those that explain others first; the first one is open. */
function findingList({ name, verdict: { findings } }) {
  if (!findings.length) return null;
  const items = findings.map((one, place) => foldable(`${one.rule}, ${name}`, place === 0, "finding", ...findingNodes(one)));
  return make("section", {}, make("h3", {}, "Findings; those that explain others come first"), items);
}

/** Mean over all steps and newest value of the metrics of stability, beside their healthy ranges. */
function stabilityTable({ stability }) {
  if (!stability?.length) return null;
  const headings = ["", "metric", ["mean", "number"], "healthy", ["newest", "number"], "healthy", "source of the range"];
  const rows = stability.map((row) => [
    make("span", { title: row.why }, row.mark === "unknown" ? "?" : row.mark),
    make("a", { href: viewState.link({ view: "curves", chart: row.metric }, { isFresh: true }) }, row.metric),
    number(row.mean), row.healthy_mean || "-", number(row.last), row.healthy_last || "-", row.source || "-",
  ]);
  return makeTable("Stability: mean over all steps, and newest value", headings, rows);
}

function findingNodes({ severity, what, since_step: since, evidence, causes, advice }) {
  const list = (kind, heading, items) =>
    items.length ? [make("h4", {}, heading), make(kind, {}, items.map((item) => make("li", {}, item)))] : [];
  const shown = evidence.map(({ metric, text }) => [
    make("a", { href: viewState.link({ view: "curves", chart: metric }, { isFresh: true }) }, metric),
    text.startsWith(`${metric} `) ? text.slice(metric.length) : `: ${text}`,
  ]);
  const tried = (one, what) => [one, what ? make("div", { class: "muted" }, `Try: ${what}`) : null];
  const cause = causes.length ? make("span", { class: "muted" }, ` Most likely cause: ${causes[0]}.`) : null;
  return [
    [statusBadge(severity), make("strong", {}, what), ` Since step ${since}.`, cause],
    list("ul", "Evidence", shown),
    list("ol", "Likely causes, most likely first, and what to try", causes.map((one, at) => tried(one, advice[at]))),
  ];
}

const COUNTED = [["critical", "critical"], ["warning", "with a warning"], ["unknown", "not judged"]];

/** The checks that apply to the run; verdicts of older versions do not tell. */
const dueChecks = (checks) => checks.filter(({ applies }) => applies !== false);

/** The checklist, folded behind the number of passing checks; the findings show the others. */
function checkFold({ name, verdict }) {
  const checks = dueChecks(verdict.checks);
  if (!checks.length) return null;
  const rest = verdict.checks.length - checks.length;
  const count = (status) => checks.filter((check) => check.status === status).length;
  const others = COUNTED.map(([status, words]) => (count(status) ? `, ${count(status)} ${words}` : "")).join("");
  const sides = Object.entries(SIDES).map(([side, title]) => {
    const ofSide = checks.filter((check) => check.side === side);
    if (!ofSide.length) return null;
    return make("section", { class: "side" }, make("h3", {}, title), make("ul", {}, ofSide.map(checkItem)));
  });
  const summary = [statusBadge(shownStatus(verdict)), make("strong", {}, `${count("ok")} of ${plural(checks.length, "check")} pass`), others, rest ? `; ${rest} do not apply` : ""];
  return foldable(`checks, ${name}`, false, "checks", summary, make("div", { class: "checklist" }, sides));
}
