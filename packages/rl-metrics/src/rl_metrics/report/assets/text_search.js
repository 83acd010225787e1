"use strict";
// Full-text search: texts are unpacked chunk by chunk, while the page goes on.

/**
 * Rows whose prompt, response or group has the text, whatever the case, in their given order.
 * progress(share, rows) is called as it goes; null when `isOver()` said that nobody waits any longer.
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
