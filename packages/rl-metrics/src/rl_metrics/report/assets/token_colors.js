"use strict";
// Background colors and facts of tokens.

const RED = "214, 62, 42";
const BLUE = "38, 118, 201";
const VIOLET = "140, 92, 200";

function shade(color, share) {
  return Number.isNaN(share) ? "" : `rgba(${color}, ${Math.min(Math.max(share, 0), 1) * 0.75})`;
}

function twoSided(value, largest) {
  return shade(value < 0 ? RED : BLUE, Math.abs(value) / (largest || 1));
}

/** The learner's probability of a token minus the engine's. */
function probabilityGap({ policy_logprobs: policy, rollout_logprobs: rollout }, place) {
  return policy && rollout ? Math.exp(policy[place]) - Math.exp(rollout[place]) : NaN;
}

function largest(values) {
  return values.reduce((most, value) => (Math.abs(value) > most ? Math.abs(value) : most), 0);
}

/** Colorings: [label, required columns, legend, (columns) => (place) => color]. */
const COLORINGS = {
  differs: ["differences", ["differs"], "yellow: words missing in the other one",
    ({ differs }) => (place) => (differs[place] ? "var(--mark)" : "")],
  policy: ["probability, learner", ["policy_logprobs"], "red: unlikely",
    ({ policy_logprobs: values }) => (place) => shade(RED, 1 - Math.exp(values[place]))],
  rollout: ["probability, engine", ["rollout_logprobs"], "red: unlikely",
    ({ rollout_logprobs: values }) => (place) => shade(RED, 1 - Math.exp(values[place]))],
  gap: ["learner minus engine", ["policy_logprobs", "rollout_logprobs"], "blue: more likely for the learner, red: for the engine; full at 0.2",
    (columns) => (place) => twoSided(probabilityGap(columns, place), 0.2)],
  advantage: ["advantage", ["advantages"], "blue: encouraged, red: discouraged",
    ({ advantages: values }) => {
      const most = largest(values);
      return (place) => twoSided(values[place], most);
    }],
  entropy: ["entropy", ["entropy"], "violet: uncertain; full at the response's maximum",
    ({ entropy: values }) => {
      const most = largest(values) || 1;
      return (place) => shade(VIOLET, values[place] / most);
    }],
  version: ["policy version", ["versions"], "violet: older weights",
    ({ versions: values }) => {
      const oldness = oldnessOf(values);
      return (place) => shade(VIOLET, oldness(place));
    }],
  weight: ["correction weight", ["correction_weights"], "blue: above 1, red: below 1",
    ({ correction_weights: values }) => (place) => twoSided(values[place] - 1, 1)],
  mask: ["trained or not", ["mask"], "violet: not trained, such as a tool's output",
    ({ mask }) => (place) => shade(VIOLET, mask[place] ? 0 : 0.6)],
  none: ["none", [], "", () => () => ""],
};

/** Age of a token's weights, from 0 for the response's newest to 1 for its oldest. */
function oldnessOf(versions) {
  const sampled = versions.filter((version) => version >= 0);
  const [oldest, newest] = [sampled.reduce((a, b) => Math.min(a, b), Infinity), sampled.reduce((a, b) => Math.max(a, b), 0)];
  return (place) => (versions[place] < 0 || oldest === newest ? 0 : (newest - versions[place]) / (newest - oldest));
}

/** Colorings possible with a trajectory's columns. */
function possibleColorings(columns) {
  return Object.entries(COLORINGS).filter(([, [, needed]]) => needed.every((name) => name in columns));
}

/** Facts about a token as [name, text] pairs. */
function tokenFacts({ tokens, ids, columns }, place, learnerVersion) {
  const { rollout_logprobs: rollout, policy_logprobs: policy, advantages, entropy, versions, correction_weights: weights, mask } = columns;
  const isSampled = !mask || mask[place] > 0;
  const facts = [["token", `“${visible(tokens[place])}”${ids[place] >= 0 ? ` (${ids[place]})` : ""}, ${place + 1} of ${tokens.length}`]];
  facts.push(["mask", isSampled ? "1: trained" : "0: not trained"]);
  if (isSampled) {
    if (rollout) facts.push(["logprob, rollout", logprob(rollout[place])]);
    if (policy) facts.push(["logprob, policy", logprob(policy[place])]);
    if (policy && rollout) facts.push(["difference", percent(probabilityGap(columns, place))]);
    if (advantages) facts.push(["advantage", number(advantages[place])]);
    if (entropy) facts.push(["entropy", `${number(entropy[place])} nats`]);
    if (versions) facts.push(["version", `${number(versions[place])}, ${number(learnerVersion - versions[place])} behind`]);
    if (weights) facts.push(["correction weight", number(weights[place])]);
  }
  return facts;
}
