"use strict";
// The trajectories of a run: an index, with texts and tokens loaded on demand.

const BAD_BELOW = 0.5;

class Trajectories extends TextChunks {
  constructor({ header, columns }) {
    super({ header, columns });
    this.parts = header.parts;
    this.prompts = header.prompts;
    this.responses = header.responses;
  }

  get scores() {
    return this.columns.reward;
  }

  /** Values of a part of the reward, NaN if unknown; undefined if no trajectory has it. */
  part(name) {
    return this.columns[`part${this.parts.indexOf(name)}`];
  }

  /** The beginning of the question. */
  asked(row) {
    return this.prompts[this.columns.problem[row]] || snippet(this.name("problem", row), 60);
  }

  /** "good", "bad", or "none" without a score. */
  kind(row) {
    if (this.isBad(row)) return "bad";
    return Number.isNaN(this.columns.reward[row]) ? "none" : "good";
  }

  /** Whether it failed, or its score is low. */
  isBad(row) {
    return this.columns.failure[row] > 0 || this.columns.reward[row] < BAD_BELOW;
  }

  /** Prompt, response and other texts of a trajectory. */
  async text(row) {
    const fields = await this.fields(row);
    const [prompt, response, truth, uid, session, output, time, failure, components, timings, extras, turns, images] = fields;
    return { prompt, response, truth, uid, session, output, time, failure, components, timings, extras, turns, images };
  }

  /** Tokens of a trajectory: {tokens, ids, columns}, with the known columns by name. */
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
  }}
