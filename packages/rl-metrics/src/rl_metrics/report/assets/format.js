"use strict";
// Readable numbers and texts.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Replace invisible and direction-changing characters of a text by their codes. */
function visible(text) {
  const code = (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  return text.replace(CONTROL, code).replace(LONE, code);
}

/** Four significant digits, or a dash if unknown. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(4)).toExponential();
  return String(Number(value.toPrecision(4)));
}

function percent(share) {
  if (Number.isNaN(share)) return "–";
  if (share !== 0 && Math.abs(share) < 1e-5) return share > 0 ? "< 0.001 %" : "> -0.001 %";
  return `${number(Number((share * 100).toPrecision(3)))} %`;
}

/** A logprob and its probability. */
function logprob(value) {
  return Number.isNaN(value) ? "–" : `${number(value)} (${percent(Math.exp(value))})`;
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1 || value === 0) return `${Number(value.toPrecision(3))} s`;
  return value < 1e-4 ? "< 0.1 ms" : `${Number((value * 1000).toPrecision(3))} ms`;
}

function moment(epoch) {
  return epoch ? new Date(epoch * 1000).toLocaleString() : "–";
}

/** The beginning of a text on one line. */
function snippet(text, length = 120) {
  const start = text.slice(0, length + 1).replace(/\s+/g, " ");
  return start.length > length ? `${start.slice(0, length)}…` : start;
}

function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}
