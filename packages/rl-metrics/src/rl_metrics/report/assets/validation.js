"use strict";
// Answers of the policy in validations: a table with search, of two runs side by side.

const SAMPLES_AT_ONCE = 50;
const validation = { generation: 0, shown: SAMPLES_AT_ONCE };

const validationView = {
  id: "validation",
  title: "Validation",
  isThere: (runs) => runs.some(({ generations }) => generations.count),
  render(place, runs) {
    const number_ = viewState.place("run", runs.length, runs.findIndex(({ generations }) => generations.count));
    const { generations } = runs[number_];
    const status = make("p", { class: "muted", role: "status", id: "found" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Search" });
    const table = make("div", {});
    const refresh = () => listSamples({ runs, number_, status, progress, table });
    place.replaceChildren(sampleForm(runs, generations, refresh), make("div", { class: "found" }, status, progress), table);
    refresh();
  },
};

/** The form; `changed` is called when a filter changes. */
function sampleForm(runs, generations, changed) {
  const set = (name) => (value) => {
    validation.shown = SAMPLES_AT_ONCE;
    viewState.set({ [name]: value }, { isQuiet: true });
    changed();
  };
  const field = (name, properties) => stateInput(name, properties, set(name));
  const steps = [...generations.steps].reverse().map((step) => [String(step), `step ${step}`]);
  const tables = generations.names.table.map((name) => [name, snippet(name, 60)]);
  const number_ = (name, label) => field(name, { type: "number", step: "any", "aria-label": label });
  return make(
    "form",
    { class: "filters", role: "search", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    runs.length > 1 ? runChoice(runs, runs.findIndex((run) => run.generations === generations)) : null,
    labelled("Text in prompt or response", field("vq", { type: "search", id: "search", placeholder: "search" }), "grow"),
    make("button", { type: "button", onclick: () => viewState.set(noSampleFilters(), { isStep: true }) }, "Clear"),
    moreFields([
      labelled("Validation", makeSelect("Validation", [...steps, ["all", "all steps"]], String(chosenValidation(generations)), set("vstep"))),
      tables.length > 1 ? labelled("Table", makeSelect("Table", [["", "all"], ...tables], viewState.get("vtable"), set("vtable"))) : null,
      ...groupChoices(generations, set),
      labelled("Score", make("span", { class: "range" }, number_("v0", "Score from"), "–", number_("v1", "Score to"))),
      labelled("Order", makeSelect("Order", Object.entries(SAMPLE_SORTS), viewState.get("vsort"), set("vsort"))),
    ]),
  );
}

/** Choices of the groups that the samples differ in. */
function groupChoices(generations, set) {
  const choice = (kind, options) =>
    labelled(kind, makeSelect(kind, [["", "all"], ...options], viewState.get(`v${kind}`), set(`v${kind}`)));
  const named = (kind) => generations.names[kind].map((name) => (name === "" ? ["none", "not failed"] : [name, snippet(name, 60)]));
  const kinds = ["source", "finish", "failure"].filter((kind) => generations.names[kind].length > 1);
  const parts = generations.parts.map((name) => [name, `${snippet(name, 60)} below ${BAD_BELOW}`]);
  return [...kinds.map((kind) => choice(kind, named(kind))), ...(parts.length ? [choice("part", parts)] : [])];
}

function noSampleFilters() {
  return Object.fromEntries(["vq", "vstep", "vtable", "v0", "v1", "vsort", "vproblem", "vsource", "vfinish", "vfailure", "vpart"].map((name) => [name, ""]));
}

async function listSamples(parts) {
  const { runs, number_, status, progress, table } = parts;
  const generation = ++validation.generation;
  const isOver = () => generation !== validation.generation;
  const { generations } = runs[number_];
  let rows = matchingSamples(generations);
  const text = viewState.get("vq");
  if (text !== "") {
    progress.hidden = false;
    rows = await searchTexts(generations, rows, text, { isOver, progress: (share) => (progress.value = share) });
    if (!rows || isOver()) return;
  }
  const shown = rows.slice(0, validation.shown);
  const lines = await Promise.all(shown.map((row) => sampleLine(runs, number_, row)));
  if (isOver()) return;
  progress.hidden = true;
  const { recorded, count } = generations;
  status.textContent = `${plural(rows.length, "sample")}${recorded > count ? `; the report has the newest ${count.toLocaleString("en")} of ${recorded.toLocaleString("en")}` : ""}`;
  const more = make("button", { type: "button", onclick: () => ((validation.shown += SAMPLES_AT_ONCE), listSamples(parts)) }, "Show more");
  table.replaceChildren(
    viewState.get("vproblem") === "" ? "" : make("p", {}, "One problem in all validations. ", make("a", { href: viewState.link({ vproblem: "" }) }, "All problems")),
    makeTable("Samples of validations", sampleHeadings(runs, number_), lines),
    rows.length > shown.length ? more : "",
  );
}

function otherWithSamples(runs, number_) {
  return runs.findIndex(({ generations }, place) => place !== number_ && generations.count > 0);
}

function sampleHeadings(runs, number_) {
  const beside = otherWithSamples(runs, number_);
  const ofRun = (name, run) => (runs.length > 1 ? `${name}, ${runs[run].header.name}` : name);
  const own = [["step", "number"], ["prompt", "long"], "expected", ["score", "number"], [ofRun("response", number_), "long"], ["", "long"]];
  return beside < 0 ? own : [...own, ["step", "number"], ["score", "number"], [ofRun("response", beside), "long"]];
}

async function sampleLine(runs, number_, row) {
  const { generations } = runs[number_];
  const [prompt, response, truth, uid, source, failure, versions, components, images] = await generations.fields(row);
  const step = generations.columns.step[row];
  const parts = Object.entries(components).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [`version ${[...new Set(versions)].join(" to ")}`, source, ...parts].join(", ");
  const line = [
    step, [sampleText(prompt), imageNodes(images)], truth === null ? "–" : sampleText(truth), sampleScore(generations, row),
    [sampleText(response), failure === null ? null : make("div", { class: "failure" }, `Failed: ${failure}`)].filter(Boolean),
    [make("a", { href: viewState.link({ vproblem: uid, vstep: "" }) }, "all steps"), make("div", { class: "note" }, facts)],
  ];
  const beside = otherWithSamples(runs, number_);
  if (beside < 0) return line;
  const other = runs[beside].generations.nearest(uid, step);
  if (other === undefined) return [...line, "–", "–", "–"];
  const [, answer] = await runs[beside].generations.fields(other);
  return [...line, runs[beside].generations.columns.step[other], sampleScore(runs[beside].generations, other), sampleText(answer)];
}

function sampleScore(generations, row) {
  return make("span", { class: `score ${generations.kind(row)}` }, number(generations.columns.score[row]));
}

function sampleText(text) {
  return make("div", { class: "sample", dir: "auto" }, text === "" ? "∅" : text);
}
