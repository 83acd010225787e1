"use strict";
// A trajectory as JSON, with the names of rollouts.jsonl.

const TOLD_MS = 2000;

function rowJson(trajectories, row, { text, part }) {
  const { step, reward, version } = trajectories.columns;
  const near = (value) => (Number.isInteger(value) ? value : Number.isFinite(value) ? Number(value.toPrecision(5)) : null);
  const numbers = (values) => Array.from(values, near);
  const { mask, ...columns } = part?.columns ?? {};
  delete columns.differs;
  return {
    step: step[row],
    ...(text.time === null ? {} : { time: text.time }),
    prompt_uid: text.uid,
    problem: trajectories.name("problem", row),
    session: text.session,
    output: text.output,
    source: trajectories.name("source", row),
    prompt: text.prompt,
    response: text.response,
    ground_truth: text.truth,
    reward: near(reward[row]),
    components: text.components,
    extras: text.extras,
    turns: text.turns,
    finish: trajectories.name("finish", row),
    timings: text.timings,
    failure: text.failure,
    policy_version: version[row],
    tokens: part?.tokens ?? [],
    ...(mask ? { mask: Array.from(mask) } : {}),
    ...(part?.ids.every((id) => id >= 0) ? { token_ids: part.ids } : {}),
    ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, numbers(values)])),
  };
}

async function copyJson(button, trajectories, row, own) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(JSON.stringify(rowJson(trajectories, row, own), null, 1));
    button.textContent = "Copied";
  } catch (error) {
    button.textContent = `Not copied: ${error.message}`;
  }
  setTimeout(() => (button.textContent = label), TOLD_MS);
}
