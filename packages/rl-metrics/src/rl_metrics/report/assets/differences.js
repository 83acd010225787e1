"use strict";
// Word-level differences of two texts.

const WORD_OR_SIGN = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_CELLS = 4e6; // maximum size of the table; longer texts differ from the first to the last difference

/** For each character of both texts, whether its word is missing in the other: [Uint8Array, Uint8Array]. */
function differences(one, other) {
  const texts = [one, other];
  const words = texts.map((text) => text.match(WORD_OR_SIGN) ?? []);
  const kept = keptWords(...words);
  return texts.map((text, side) => {
    const differs = new Uint8Array(text.length);
    let place = 0;
    words[side].forEach((word, index) => {
      if (!kept[side].has(index)) differs.fill(1, place, place + word.length);
      place += word.length;
    });
    return differs;
  });
}

/** Indices in both texts of the words of a longest common subsequence. */
function keptWords(one, other) {
  const kept = [new Set(), new Set()];
  const keep = (place, otherPlace) => (kept[0].add(place), kept[1].add(otherPlace));
  let [first, last, otherLast] = [0, one.length, other.length];
  while (first < last && first < otherLast && one[first] === other[first]) keep(first, first++);
  while (last > first && otherLast > first && one[last - 1] === other[otherLast - 1]) keep(--last, --otherLast);
  const [height, width] = [last - first, otherLast - first + 1];
  if ((height + 1) * width > MOST_CELLS) return kept;
  const longest = new Uint16Array((height + 1) * width); // of the rest after a word of each
  for (let row = height - 1; row >= 0; row--) {
    for (let column = width - 2; column >= 0; column--) {
      const at = row * width + column;
      longest[at] = one[first + row] === other[first + column] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
    }
  }
  for (let row = 0, column = 0; row < height && column < width - 1; ) {
    const at = row * width + column;
    if (one[first + row] === other[first + column]) keep(first + row++, first + column++);
    else if (longest[at + width] >= longest[at + 1]) row++;
    else column++;
  }
  return kept;
}
