"use strict";
// Samples of a run's validations, and the selection to show.

class Generations extends TextChunks {
  constructor({ header, columns }) {
    super({ header, columns });
    this.parts = header.parts;
    this.prompts = header.prompts;
  }

  get scores() {
    return this.columns.score;
  }

  /** Values of a part of the reward, NaN if unknown. */
  part(name) {
    return this.columns[`part${this.parts.indexOf(name)}`];
  }

  /** The beginning of the prompt. */
  asked(row) {
    return this.prompts[this.columns.problem[row]];
  }

  /** Steps of the validations, increasing. */
  get steps() {
    return [...new Set(this.columns.step)];
  }

  /** Whether its session failed, or its score is low. */
  isBad(row) {
    return this.columns.failure[row] > 0 || this.columns.score[row] < BAD_BELOW;
  }

  kind(row) {
    if (this.isBad(row)) return "bad";
    return Number.isNaN(this.columns.score[row]) ? "none" : "good";
  }
}

const SAMPLE_SORTS = { "": "as recorded", worst: "lowest score first", best: "highest score first", problem: "by problem" };

/** The step of the shown validation, or "all"; the newest unless the URL has another. */
function chosenValidation(generations) {
  const wanted = viewState.get("vstep");
  if (wanted === "all") return wanted;
  const { steps } = generations;
  return steps.includes(Number(wanted)) && wanted !== "" ? Number(wanted) : steps.at(-1);
}

/** Predicates for the groups in the URL; a part of the reward is that of samples where it is low. */
function groupFilters(generations) {
  const { columns, names } = generations;
  const chosen = ["source", "finish", "failure"].filter((kind) => viewState.get(`v${kind}`) !== "");
  const filters = chosen.map((kind) => {
    const name = viewState.get(`v${kind}`);
    const code = kind === "failure" && name === "none" ? 0 : names[kind].indexOf(name);
    return (row) => columns[kind][row] === code;
  });
  const part = generations.part(viewState.get("vpart"));
  return part ? [...filters, (row) => part[row] < BAD_BELOW] : filters;
}

/** Rows that match the filters in the URL, except the text search. */
function matchingSamples(generations) {
  const { step, score, table, problem } = generations.columns;
  const chosen = viewState.get("vproblem") === "" ? chosenValidation(generations) : "all";
  const code = (kind, name) => (viewState.get(name) === "" ? null : generations.names[kind].indexOf(viewState.get(name)));
  const [ofTable, ofProblem] = [code("table", "vtable"), code("problem", "vproblem")];
  const inScore = viewState.range("v0", "v1");
  const inGroups = groupFilters(generations);
  const rows = [...Array(generations.count).keys()].filter(
    (row) =>
      (chosen === "all" || step[row] === chosen) &&
      (ofTable === null || table[row] === ofTable) &&
      (ofProblem === null || problem[row] === ofProblem) &&
      (!inScore || inScore(score[row])) &&
      inGroups.every((isIn) => isIn(row)),
  );
  const worth = (row) => (Number.isNaN(score[row]) ? Infinity : score[row]);
  const orders = {
    worst: (one, other) => worth(one) - worth(other),
    best: (one, other) => worth(other) - worth(one),
    problem: (one, other) => problem[one] - problem[other],
  };
  const order = orders[viewState.key("vsort", orders)];
  return order ? rows.sort((one, other) => order(one, other) || one - other) : rows;
}
