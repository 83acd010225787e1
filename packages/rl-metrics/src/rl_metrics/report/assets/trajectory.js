"use strict";
// One trajectory: what was asked, what was answered, token by token, and the same problem at other steps.

/** Show a row of a run in a place, perhaps beside another; null when the place was given something else meanwhile. */
async function showTrajectory(place, runs, number_, row, { isBeside = false } = {}) {
  const run = runs[number_];
  const { trajectories } = run;
  const key = trajectoryKey(runs, number_, row);
  place.shown = key;
  const [text, part] = await Promise.all([trajectories.text(row), trajectories.tokens(row)]);
  if (place.shown !== key) return null;
  const learnerVersion = trajectories.columns.version[row];
  const possible = possibleColorings(part.columns);
  const chosen = () => {
    const wanted = viewState.get("color", "policy");
    return possible.some(([key]) => key === wanted) ? wanted : possible[0][0];
  };
  const view = tokenView(part, learnerVersion, chosen);
  place.paint = view.paint;
  const meaning = make("span", { class: "muted" }, COLORINGS[chosen()][2]);
  const colors = makeSelect("Colour", possible.map(([key, [label]]) => [key, label]), chosen(), (value) => {
    viewState.set({ color: value });
    meaning.textContent = COLORINGS[value][2];
    document.querySelectorAll(".pane").forEach((pane) => pane.paint?.());
  });
  const answer = part.tokens.length ? view.nodes : plainText(text.response);
  place.replaceChildren(
    make("h3", {}, runs.length > 1 ? `${run.header.name} · ` : "", snippet(trajectories.name("problem", row), 80)),
    trajectoryFacts(trajectories, row, text),
    text.failure ? make("p", { class: "failure" }, `Failed: ${text.failure}`) : "",
    make("h4", {}, "Prompt"),
    plainText(text.prompt),
    make("div", { class: "bar" }, make("h4", {}, "Response"), part.tokens.length ? labelled("Colour", colors) : null, meaning),
    ...[answer].flat(),
    text.truth === null ? "" : make("p", {}, "Expected: ", make("code", {}, visible(text.truth))),
    rewardParts(text, trajectories.columns.reward[row]),
    isBeside ? "" : sameProblem(runs, number_, row),
  );
  return text;
}

/** Another one when a run that still writes has put another trajectory there, or has more of the problem. */
function trajectoryKey(runs, number_, row) {
  const { trajectories } = runs[number_];
  const problem = trajectories.name("problem", row);
  const counts = runs.map((run) => run.trajectories.ofProblem(problem).length);
  return [number_, row, trajectories.columns.step[row], counts, problem].join("/");
}

function plainText(text) {
  const box = make("pre", { class: "text", tabindex: "0", dir: "auto" });
  box.textContent = visible(text);
  return box;
}

function trajectoryFacts(trajectories, row, text) {
  const { step, reward, length, staleness, mismatch, entropy, version, advantage } = trajectories.columns;
  const facts = [
    ["reward", number(reward[row])],
    ["step", step[row]],
    ["source", trajectories.name("source", row)],
    ["finish", trajectories.name("finish", row)],
    ["tokens", length[row]],
    ["policy version", version[row]],
    ["staleness", staleness[row] < 0 ? "–" : staleness[row]],
    ["mean advantage", number(advantage[row])],
    ["mean entropy", number(entropy[row])],
    ["mean mismatch", number(mismatch[row])],
    ["group", `${text.uid}, session ${text.session}, output ${text.output}`],
  ];
  const times = Object.entries(text.timings).map(([name, value]) => [
    name.replace(/_s$/, " time"), name.endsWith("_s") ? seconds(value) : number(value),
  ]);
  return make("dl", { class: "facts wide" }, [...facts, ...times].map((fact) => make("div", {}, factNodes([fact]))));
}

function rewardParts(text, reward) {
  const parts = Object.entries(text.components);
  if (!parts.length) return "";
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value ?? 0)));
  const rows = parts.map(([name, value]) => {
    const bar = make("meter", { min: 0, max: most, value: Math.abs(value ?? 0), "aria-label": visible(name) });
    return [name, number(value), bar];
  });
  return makeTable(`Parts of the reward ${number(reward)}`, ["part", ["value", "number"], ""], rows);
}

const MAX_SAME = 60;

/** The trajectories of the same problem, of all runs, over the steps. */
function sameProblem(runs, ofRun, row) {
  const problem = runs[ofRun].trajectories.name("problem", row);
  const tables = runs.map(({ header, trajectories }, number_) => {
    const rows = trajectories.ofProblem(problem);
    if (!rows.length) return null;
    const { step, reward } = trajectories.columns;
    const near = aroundRow(rows, number_ === ofRun ? rows.indexOf(row) : 0);
    const lines = near.map((other) => {
      const isThis = number_ === ofRun && other === row;
      const link = make("a", { href: viewState.link({ run: number_, row: other }), "aria-current": isThis ? "true" : null }, `step ${step[other]}`);
      return [link, make("span", { class: `score ${trajectories.kind(other)}` }, number(reward[other])), trajectories.responses[other] || "∅"];
    });
    const more = rows.length > near.length ? `, ${near.length} of them` : "";
    const title = `${runs.length > 1 ? `${header.name}: ` : ""}${plural(rows.length, "trajectory", "trajectories")}${more}`;
    return makeTable(title, ["step", ["reward", "number"], "response"], lines);
  });
  return make("section", { class: "same", "aria-label": "The same problem" }, make("h4", {}, "The same problem across steps"), tables.filter(Boolean));
}

/** So many rows around one place. */
function aroundRow(rows, place) {
  const first = Math.max(0, Math.min(place - MAX_SAME / 2, rows.length - MAX_SAME));
  return rows.slice(first, first + MAX_SAME);
}
