"use strict";
// Full-text search: texts are unpacked by chunk while the page stays responsive.

/**
 * Rows whose prompt, response or group contains the text, ignoring case, in the given order.
 * progress(share, rows) is called during the search; null if `isOver()` cancels it.
 */
async function searchTexts(trajectories, rows, text, { progress, isOver }) {
  const wanted = text.toLowerCase();
  const chunks = new Map();
  for (const row of rows) {
    const chunk = trajectories.chunkOf(row);
    if (!chunks.has(chunk)) chunks.set(chunk, []);
    chunks.get(chunk).push(row);
  }
  const found = new Set();
  let done = 0;
  let shown = performance.now();
  for (const [chunk, ofChunk] of chunks) {
    const texts = (await unpack(await store.load(trajectories.chunks[chunk].texts))).header.rows;
    const { first } = trajectories.chunks[chunk];
    for (const row of ofChunk) {
      const [prompt, response, , uid] = texts[row - first];
      if ([prompt, response, uid].some((one) => one.toLowerCase().includes(wanted))) found.add(row);
    }
    if (isOver()) return null;
    done++;
    if (performance.now() - shown > 100) {
      progress(done / chunks.size, rows.filter((row) => found.has(row)));
      await breathe();
      shown = performance.now();
    }
  }
  return rows.filter((row) => found.has(row));
}
