"use strict";
// A run that hangs: who waits for whom, and each role's position in its code.

/** Text for the verdict at the top of the page; "" unless the run hangs now. */
function hangInShort({ hang }) {
  if (!hang || hang.is_over) return "";
  const since = hang.no_progress_s === null ? "" : ` for ${seconds(hang.no_progress_s)}`;
  return `It hangs: no progress${since}. ${hang.verdict} `;
}

function hangSection({ header }, isOneOfMany) {
  const { hang } = header;
  if (!hang) return null;
  const name = isOneOfMany ? `${header.name}: ` : "";
  const title = hang.is_over ? `${name}the run hung, and has continued since` : `${name}the run hangs`;
  const facts = [
    ["reported", hang.at || "–"],
    ["no progress for", seconds(hang.no_progress_s)],
    ["last progress", hang.last_progress || "–"],
    ["queue", hang.queue.map(([what, count]) => `${what} ${number(count)}`).join(", ") || "–"],
  ];
  const causes = hang.causes.length ? [make("h3", {}, "Where the waits end"), make("ol", {}, hang.causes.map((cause) => make("li", {}, cause)))] : [];
  return foldable(
    title, !hang.is_over, hang.is_over ? "hang over" : "hang",
    [statusBadge(hang.is_over ? "warning" : "critical"), make("strong", {}, title)],
    make("p", { class: "verdict" }, hang.verdict),
    causes,
    make("dl", { class: "facts" }, factNodes(facts)),
    hang.roles.length ? makeTable("Roles", ["role", "state", ["for", "number"], ["waits for", "long"], "holds", ["runs in", "long"]], hang.roles.map((role) => roleLine(role, header.name))) : null,
    hang.groups.length ? makeTable("Unfinished groups, oldest first", ["group", "state", ["age", "number"], ["attempt", "number"], "missing sessions", "holder"], hang.groups.map(groupLine)) : null,
  );
}

function roleLine({ name, state, since_s: since, is_answering: isAnswering, waits, leases, counts, where, stack }, run) {
  const waiting = waits.map(({ what, on, since_s: waited }) => make("div", {}, `${what} on ${on}, for ${seconds(waited)}`));
  const holds = [leases.length ? plural(leases.length, "group") : "", ...counts.map(([what, count]) => `${what} ${number(count)}`)];
  const full = foldable(`stack of ${name}, ${run}`, false, null, where[0] ?? "stack", make("pre", { class: "text" }, stack));
  return [
    name, make("span", { class: isAnswering ? null : "failure" }, isAnswering ? state : `${state}, does not answer`),
    seconds(since), waiting.length ? waiting : "–", holds.filter(Boolean).join(", ") || "–", stack ? full : "–",
  ];
}

function groupLine({ uid, state, missing, age_s: age, attempt, holder }) {
  return [uid, state, seconds(age), number(attempt), missing.join(", ") || "–", holder || "–"];
}
