"use strict";
// Rows with an index of columns that is there at once, and texts that are unpacked a chunk at a time.

class TextChunks {
  constructor({ header, columns }) {
    this.columns = columns;
    this.names = header.names;
    this.chunks = header.chunks;
    this.recorded = header.recorded;
    this.count = columns.step.length;
    this.rowsOfProblem = null;
  }

  /** What a column that holds codes of names says of a row. */
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

  /** The texts of a row, as they were packed. */
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

  /** The row of a problem at the step that is nearest to one; undefined where there is none. */
  nearest(problem, step) {
    const distance = (row) => Math.abs(this.columns.step[row] - step);
    return this.ofProblem(problem).reduce((best, row) => (best === undefined || distance(row) < distance(best) ? row : best), undefined);
  }
}
