"use strict";
// Rows with an index that is loaded at once, and texts that are unpacked by chunk.

class TextChunks {
  constructor({ header, columns }) {
    this.columns = columns;
    this.names = header.names;
    this.chunks = header.chunks;
    this.recorded = header.recorded;
    this.count = columns.step.length;
    this.rowsOfProblem = null;
  }

  /** The name of a row in a column of codes. */
  name(kind, row) {
    return this.names[kind][this.columns[kind][row]];
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

  /** The packed texts of a row. */
  async fields(row) {
    const { first, texts } = this.chunks[this.chunkOf(row)];
    return (await store.read(texts)).header.rows[row - first];
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
      this.codeOfProblem = new Map(this.names.problem.map((one, code) => [one, code]));
    }
    return this.rowsOfProblem.get(this.codeOfProblem.get(name)) ?? [];
  }

  /** The row of a problem at the nearest step; undefined without one. */
  nearest(problem, step) {
    const distance = (row) => Math.abs(this.columns.step[row] - step);
    return this.ofProblem(problem).reduce((best, row) => (best === undefined || distance(row) < distance(best) ? row : best), undefined);
  }
}
