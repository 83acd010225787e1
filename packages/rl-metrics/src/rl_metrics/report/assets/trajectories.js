"use strict";
// The trajectories of a run: an index of all of them, texts and tokens when they are asked for.

const BAD_BELOW = 0.5;

class Trajectories {
  constructor({ header, columns }) {
    this.columns = columns;
    this.names = header.names;
    this.chunks = header.chunks;
    this.recorded = header.recorded;
    this.count = columns.step.length;
    this.rowsOfProblem = null;
  }

  /** The source, problem, finish or failure of a trajectory. */
  name(kind, row) {
    return this.names[kind][this.columns[kind][row]];
  }

  /** Whether it failed, or its score is low. */
  isBad(row) {
    return this.columns.failure[row] > 0 || this.columns.reward[row] < BAD_BELOW;
  }

  chunkOf(row) {
    let [low, high] = [0, this.chunks.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.chunks[middle].first <= row) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  async texts(chunk) {
    return (await store.read(this.chunks[chunk].texts)).header.rows;
  }

  /** Prompt, response and what else is text of a trajectory. */
  async text(row) {
    const chunk = this.chunkOf(row);
    const fields = (await this.texts(chunk))[row - this.chunks[chunk].first];
    const [prompt, response, truth, uid, session, output, time, failure, components, timings] = fields;
    return { prompt, response, truth, uid, session, output, time, failure, components, timings };
  }

  /** Tokens of a trajectory: {tokens, ids, columns}, columns by name of those that are known. */
  async tokens(row) {
    const chunk = this.chunkOf(row);
    const part = await store.read(this.chunks[chunk].tokens);
    const { lengths, codes, ...columns } = part.columns;
    const place = row - this.chunks[chunk].first;
    part.starts ??= lengths.reduce((starts, length) => (starts.push(starts.at(-1) + length), starts), [0]);
    const [start, end] = [part.starts[place], part.starts[place + 1]];
    const own = Object.entries(columns).map(([name, values]) => [name, values.subarray(start, end)]);
    const known = own.filter(([, values]) => values.some((value) => !Number.isNaN(value)));
    const coded = codes.subarray(start, end);
    return {
      tokens: Array.from(coded, (code) => part.header.tokens[code]),
      ids: Array.from(coded, (code) => part.header.ids[code]),
      columns: Object.fromEntries(known),
    };
  }

  /** Rows of the problem with this name, by step. */
  ofProblem(name) {
    if (!this.rowsOfProblem) {
      this.rowsOfProblem = new Map();
      this.columns.problem.forEach((code, row) => {
        const rows = this.rowsOfProblem.get(code);
        if (rows) rows.push(row);
        else this.rowsOfProblem.set(code, [row]);
      });
    }
    return this.rowsOfProblem.get(this.names.problem.indexOf(name)) ?? [];
  }
}
