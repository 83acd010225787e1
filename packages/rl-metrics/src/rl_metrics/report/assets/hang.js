"use strict";
// A run that hangs: who does not answer, what each role does, and its position in its code.

/** Text for the verdict at the top of the page; "" unless the run hangs now. */
function hangInShort({ hang }) {
  return hang && !hang.is_over ? `It hangs: ${hang.summary}. ` : "";
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
  return foldable(
    title, !hang.is_over, hang.is_over ? "hang over" : "hang",
    [statusBadge(hang.is_over ? "warning" : "critical"), make("strong", {}, title)],
    make("p", { class: "verdict" }, hang.summary),
    make("dl", { class: "facts" }, factNodes(facts)),
    hang.roles.length ? makeTable("Roles", ["role", "state", ["does", "long"], "counts", ["runs in", "long"]], hang.roles.map((role) => roleLine(role, header.name))) : null,
  );
}

function roleLine({ name, state, since_s: since, is_answering: isAnswering, doing, counts, where, stack }, run) {
  const full = foldable(`stack of ${name}, ${run}`, false, null, where[0] ?? "stack", make("pre", { class: "text" }, stack));
  return [
    name, make("span", { class: isAnswering ? null : "failure" }, isAnswering ? state : `${state}, does not answer for ${seconds(since)}`),
    doing || "–", counts.map(([what, count]) => `${what} ${number(count)}`).join(", ") || "–", stack ? full : "–",
  ];
}
