"use strict";
// One trajectory: its conversation, reward and group, and the same problem at other steps.

/** The texts of a trajectory, and its tokens within the response, or null without tokens. */
async function readWhole(trajectories, row) {
  const [text, known] = await Promise.all([trajectories.text(row), trajectories.tokens(row)]);
  if (!known.tokens.length) return { text, response: text.response, part: null };
  const texts = readTokens(known.tokens, text.response);
  return { text, response: texts.join(""), part: { ...known, texts, starts: startsOf(texts) } };
}

function turnsOf({ text, response, part }) {
  return conversationOf(text.prompt, response, part ? repliesOf(part.columns.mask, part.starts) : []);
}

/**
 * Show a row of a run in a place; null if the place received other content meanwhile.
 * against: [run, row] to compare words with.
 */
async function showTrajectory(place, runs, number_, row, { isBeside = false, against = null } = {}) {
  const { header, trajectories } = runs[number_];
  const key = trajectoryKey(runs, number_, row, against);
  place.shown = key;
  const [own, other, group] = await Promise.all([
    readWhole(trajectories, row), against ? readWhole(runs[against[0]].trajectories, against[1]) : null, groupOf(trajectories, row),
  ]);
  if (place.shown !== key) return null;
  const { text } = own;
  place.replaceChildren(
    make("h2", {}, runs.length > 1 ? `${header.name} · ` : "", snippet(trajectories.name("problem", row), 80), viewState.get("with") === "" ? "" : ` · ${sessionName(text, group)}`),
    actionBar(trajectories, number_, row, own, isBeside ? [] : group),
    ...trajectoryFacts(trajectories, row, text),
    text.failure ? make("p", { class: "failure" }, `Failed: ${text.failure}`) : "",
    imageNodes(text.images),
    ...conversationNodes(place, trajectories.columns.version[row], own, { isBeside, differs: other && differences(own.response, other.response)[0] }),
    text.truth === null ? "" : make("p", {}, "Expected: ", make("code", {}, visible(typeof text.truth === "string" ? text.truth : JSON.stringify(text.truth)))),
    rewardParts(text, trajectories, row, group, runs.length > 1 ? ` of ${header.name}` : ""),
    extrasNode(text.extras),
    isBeside ? "" : sessionTree(trajectories, number_, row, group),
    isBeside ? "" : groupTree(trajectories, number_, row, group),
    isBeside ? "" : sameProblem(runs, number_, row),
  );
  return text;
}

/** Thumbnails of a trajectory's images, in order; a number for an image that the report does not have. */
function imageNodes(images) {
  if (!images.length) return "";
  const shown = images.map((part, place) => {
    const name = `image ${place + 1}`;
    if (!part) return make("span", { class: "muted" }, name);
    const picture = make("img", { alt: name, title: name });
    store.read(part).then(({ header }) => picture.setAttribute("src", header.url));
    return picture;
  });
  return make("div", { class: "bar images", role: "group", "aria-label": "Images" }, shown);
}

/** The turns of prompt and response, with colored tokens if they are known. */
function conversationNodes(place, version, { text, response, part }, { isBeside, differs }) {
  const { asked, answered } = turnsOf({ text, response, part });
  const showPrompt = (start, end) => visible(text.prompt.slice(start, end));
  const lay = (show) => turnNodes(response, answered, show);
  const prompt = [make(
    "details", { open: viewState.get("with") === "" }, make("summary", {}, make("h3", {}, "Prompt")), // two responses of a group share it
    make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Prompt" }, turnNodes(text.prompt, asked, showPrompt)),
  )];
  place.paint = null;
  if (!part) {
    const shown = lay((start, end) => markedText(response, differs, start, end));
    const box = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Response" }, shown.length ? shown : "∅");
    return [...prompt, make("h3", {}, "Response"), box];
  }
  if (differs) part.columns.differs = part.tokens.map((_, at) => Number(differs.subarray(part.starts[at], part.starts[at + 1]).includes(1)));
  const { chosen, field } = colorChoice(part.columns);
  const isStill = ((shown) => () => place.shown === shown)(place.shown);
  const told = settled((token) => !isBeside && isStill() && viewState.set({ token }, { isQuiet: true }));
  const view = tokenView(part, version, { coloring: chosen, lay, told });
  place.paint = view.paint;
  const token = viewState.place("token", part.tokens.length);
  if (!isBeside && token >= 0) setTimeout(() => isStill() && view.goTo(token));
  return [...prompt, make("div", { class: "bar" }, make("h3", {}, "Response"), field), ...view.nodes];
}

/** The choice of a coloring for all panes; compared responses default to their differences. */
function colorChoice(columns) {
  const possible = possibleColorings(columns);
  const chosen = () => {
    const wanted = viewState.get("color", viewState.get("with") === "" ? "policy" : "differs");
    return possible.some(([key]) => key === wanted) ? wanted : possible[0][0];
  };
  const meaning = make("span", { class: "muted" }, COLORINGS[chosen()][2]);
  const colors = makeSelect("Color", possible.map(([key, [label]]) => [key, label]), chosen(), (value) => {
    viewState.set({ color: value });
    meaning.textContent = COLORINGS[value][2];
    document.querySelectorAll(".pane").forEach((pane) => pane.paint?.());
  });
  return { chosen, field: [labelled("Color", colors), meaning] };
}

/** A range of a text, with differing words marked. */
function markedText(text, differs, start, end) {
  if (!differs) return visible(text.slice(start, end));
  const nodes = [];
  for (let from = start; from < end; ) {
    let to = from;
    while (to < end && differs[to] === differs[from]) to++;
    nodes.push(differs[from] ? make("mark", {}, text.slice(from, to)) : visible(text.slice(from, to)));
    from = to;
  }
  return nodes;
}

/** A key that changes if a running run has another trajectory at the row, or more of the problem. */
function trajectoryKey(runs, number_, row, against) {
  const { trajectories } = runs[number_];
  const problem = trajectories.name("problem", row);
  const counts = runs.map((run) => run.trajectories.ofProblem(problem).length);
  return [number_, row, trajectories.columns.step[row], counts, against, problem].join("/");
}

function trajectoryFacts(trajectories, row, text) {
  const { step, reward, length, staleness, mismatch, entropy, version, advantage } = trajectories.columns;
  const facts = [
    ["reward", number(reward[row])],
    ["step", step[row]],
    ["source", trajectories.name("source", row)],
    ["finish", trajectories.name("finish", row)],
    ["tokens", length[row]],
    ["staleness", staleness[row] < 0 ? "–" : staleness[row]],
  ];
  const more = [
    ["policy version", version[row]],
    ["mean advantage", number(advantage[row])],
    ["mean entropy", number(entropy[row])],
    ["mean mismatch", number(mismatch[row])],
    ["group", `${text.uid}, session ${text.session}, output ${text.output}`],
  ];
  const times = Object.entries(text.timings).map(([name, value]) => [
    name.replace(/_s$/, " time"), name.endsWith("_s") ? seconds(value) : number(value),
  ]);
  return [
    make("dl", { class: "facts wide" }, facts.map((fact) => make("div", {}, factNodes([fact])))),
    make("details", {}, make("summary", { class: "note" }, "More"), make("dl", { class: "facts" }, factNodes([...more, ...times]))),
  ];
}

/** The parts of the reward, with their means over the group. */
function rewardParts(text, trajectories, row, group, ofRun) {
  const parts = Object.entries(text.components);
  if (!parts.length) return "";
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value ?? 0)));
  const rows = parts.map(([name, value]) => {
    const bar = make("meter", { min: 0, max: most, value: Math.abs(value ?? 0), "aria-label": visible(name) });
    const known = group.map((one) => one.text.components[name]).filter((one) => one !== null && one !== undefined);
    return [name, number(value), bar, number(known.reduce((sum, one) => sum + one, 0) / known.length)];
  });
  const headings = ["part", ["value", "number"], "", ["group's mean", "number"]];
  const count = group.length > 1 ? 4 : 3;
  return makeTable(`Parts of the reward ${number(trajectories.columns.reward[row])}, ${sessionName(text, group)}${ofRun}`, headings.slice(0, count), rows.map((cells) => cells.slice(0, count)));
}

/** Further values from the reward and the agent loop. */
function extrasNode(extras) {
  const facts = Object.entries(extras).map(([name, value]) => [
    visible(name), make("code", {}, visible(typeof value === "string" ? value : JSON.stringify(value))),
  ]);
  if (!facts.length) return "";
  return make("details", { class: "extras", open: true }, make("summary", {}, make("h3", {}, "Extras")), make("dl", { class: "facts" }, factNodes(facts)));
}

const MAX_SAME = 60;

/** Trajectories of the same problem in all runs, over the steps. */
function sameProblem(runs, ofRun, row) {
  const problem = runs[ofRun].trajectories.name("problem", row);
  const tables = runs.map(({ header, trajectories }, number_) => {
    const rows = trajectories.ofProblem(problem);
    if (!rows.length) return null;
    const { step, reward } = trajectories.columns;
    const near = aroundRow(rows, number_ === ofRun ? rows.indexOf(row) : 0);
    const lines = near.map((other) => {
      const isThis = number_ === ofRun && other === row;
      const link = make("a", { href: viewState.link({ run: number_, row: other, ...NO_CHOICE }), "aria-current": isThis ? "true" : null }, `step ${step[other]}`);
      return [link, make("span", { class: `score ${trajectories.kind(other)}` }, number(reward[other])), trajectories.responses[other] || "∅"];
    });
    const more = rows.length > near.length ? `, ${near.length} of them` : "";
    const title = `${runs.length > 1 ? `${header.name}: ` : ""}${plural(rows.length, "trajectory", "trajectories")}${more}`;
    return makeTable(title, ["step", ["reward", "number"], ["response", "long"]], lines);
  });
  return make("section", { class: "same", "aria-label": "The same problem" }, make("h3", {}, "The same problem across steps"), tables.filter(Boolean));
}

/** At most MAX_SAME rows around a place. */
function aroundRow(rows, place) {
  const first = Math.max(0, Math.min(place - MAX_SAME / 2, rows.length - MAX_SAME));
  return rows.slice(first, first + MAX_SAME);
}
