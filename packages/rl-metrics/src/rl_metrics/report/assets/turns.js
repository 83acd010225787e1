"use strict";
// The turns of a conversation, parsed from control tokens of common chat templates, and their blocks.

/** The start of a turn, with the name of its role. */
const BEGINS = new RegExp([
  /<\|im_start\|>(?<chatml>[^\n<]{0,60})\n?/, // Qwen, SmolLM, OLMo
  /<\|(?:start_header_id|header_start)\|>(?<llama>[^<]{0,60})<\|(?:end_header_id|header_end)\|>\s*/,
  /<(?:start_of_turn>|\|turn>)(?<gemma>[^\n<]{0,60})\n?/,
  /(?:<\|start\|>(?<harmony>[^<]{0,60}))?(?:<\|channel\|>(?<channel>[^<]{0,60}))?(?:<\|constrain\|>[^<]{0,20})?<\|message\|>/, // gpt-oss
  /<\|start\|>(?<begun>[^<]{0,60})$/,
  /<[|｜](?<bars>system|user|assistant|tool|observation|System|User|Assistant|Tool)[|｜]>\n?/, // Phi, GLM, DeepSeek
  /\[(?<mistral>\/?INST|\/?SYSTEM_PROMPT|\/?AVAILABLE_TOOLS|\/?TOOL_RESULTS)\]/,
].map(({ source }) => source).join("|"), "g");

/** The end of a turn. */
const ENDS = /(?:<\|(?:im_end|eot_id|eom_id|eot|end|return|call|endoftext|end_of_text)\|>|<end_of_turn>|<turn\|>|<\/s>|<eos>|<｜end▁of▁sentence｜>|\s)+$/;
const MOST_END = 200;

const ONLY_CONTROLS = /^(?:<[^<>\s]{1,40}>|\s)*$/;

/** Roles by their names in markers, if these differ. */
const ROLES = new Map([
  ["", "assistant"], ["model", "assistant"], ["/inst", "assistant"], ["/tool_results", "assistant"], ["inst", "user"],
  ["human", "user"], ["developer", "system"], ["system_prompt", "system"], ["/system_prompt", "system"],
  ["available_tools", "system"], ["/available_tools", "system"], ["tool_results", "tool"], ["ipython", "tool"],
  ["observation", "tool"],
]);

/** Blocks within a turn by opening tag: kind and closing tag; "" closes with the turn. */
const BLOCKS = new Map([
  ...["think", "thinking", "thought", "reasoning", "scratchpad"].map((name) => [`<${name}>`, ["reasoning", `</${name}>`]]),
  ["[THINK]", ["reasoning", "[/THINK]"]],
  ["<tool_call>", ["call", "</tool_call>"]],
  ["<function_call>", ["call", "</function_call>"]],
  ["<｜tool▁calls▁begin｜>", ["call", "<｜tool▁calls▁end｜>"]],
  ["[TOOL_CALLS]", ["call", ""]],
  ["<|python_tag|>", ["call", ""]],
  ["<tool_response>", ["result", "</tool_response>"]],
  ["<｜tool▁outputs▁begin｜>", ["result", "<｜tool▁outputs▁end｜>"]],
]);
const OPENS = anyOf([...BLOCKS.keys()]);
const UNOPENED = anyOf([...BLOCKS.values()].filter(([kind]) => kind === "reasoning").map(([, close]) => close));
const CALLED = /"name"\s*:\s*"([^"]{1,80})"|<function=([^<>\s]{1,80})>|\bto=([\w.-]{1,80})/;

function anyOf(texts) {
  return new RegExp(texts.map((text) => text.replace(/[[\]|]/g, "\\$&")).join("|"), "g");
}

/** Turns of a range of a text: {role, channel, head, start, end}; the marker is from head to start. */
function splitTurns(text, role, from = 0, to = text.length) {
  const turns = [{ role, channel: "", head: from, start: from, end: to }];
  for (const { 0: marker, index, groups: { channel = "", ...roles } } of text.slice(from, to).matchAll(BEGINS)) {
    const head = from + index;
    turns.at(-1).end = head;
    const named = Object.values(roles).find((one) => one !== undefined) ?? "";
    turns.push({ role: roleOf(named), channel: `${named} ${channel}`, head, start: head + marker.length, end: to });
  }
  const [first, second] = turns;
  if (second && ONLY_CONTROLS.test(text.slice(first.start, first.end))) turns.splice(0, 2, { ...second, head: from });
  return turns.filter(({ head, end }) => end > head);
}

function roleOf(named) {
  const name = named.trim().toLowerCase();
  return ROLES.get(name) ?? (/^(functions?|tools?)\b/.test(name) ? "tool" : name.split(/\s/)[0]);
}

/**
 * Turns of prompt and response.
 * replies: [start, end] of each range of the response that was not sampled.
 */
function conversationOf(prompt, response, replies = []) {
  const asked = splitTurns(prompt, "prompt");
  const isChat = asked.some(({ head, start }) => start > head);
  const last = asked.at(-1);
  const isBegun = isChat && last.role === "assistant" && ONLY_CONTROLS.test(prompt.slice(last.start));
  if (isBegun) asked.pop();
  const role = isChat ? "assistant" : "response";
  const answered = [];
  let from = 0;
  for (const [start, end] of replies) {
    if (end - start === response.length || response.slice(start, end).search(BEGINS) >= 0) continue; // a marker has more information
    answered.push(...splitTurns(response, role, from, start), { role: "reply", channel: "", head: start, start, end });
    from = end;
  }
  answered.push(...splitTurns(response, role, from));
  if (isBegun && answered.length) answered[0].begun = prompt.slice(last.head);
  return { asked, answered };
}

/** Blocks of a turn: {kind, start, end}; kind is "text", "reasoning", "call", "result", or "end" for its end marker.
 * Tags in a system turn are text. */
function blocksOf(text, turn) {
  const ending = text.slice(Math.max(turn.start, turn.end - MOST_END), turn.end).match(ENDS)?.[0] ?? "";
  const end = turn.end - (ending.trim() ? ending.length : 0);
  const blocks = [];
  const add = (kind, start, stop) => stop > start && blocks.push({ kind, start, end: stop });
  const whole = wholeKind(turn);
  let place = turn.start;
  if (whole) {
    add(whole, place, end);
    place = end;
  } else if (turn.role !== "system") {
    const body = text.slice(0, end);
    for (const [kind, start, stop] of innerBlocks(body, place)) {
      add("text", place, start);
      add(kind, start, stop);
      place = stop;
    }
  }
  add("text", place, end);
  add("end", end, turn.end);
  return blocks;
}

/** The kind of a turn that is one block. */
function wholeKind({ role, channel }) {
  if (role === "tool" || role === "reply") return "result";
  if (/\banalysis\b/.test(channel)) return "reasoning";
  return /\bto=/.test(channel) ? "call" : "";
}

function* innerBlocks(body, from) {
  OPENS.lastIndex = UNOPENED.lastIndex = from;
  const closed = UNOPENED.exec(body);
  let opened = OPENS.exec(body);
  if (closed && !(opened && opened.index < closed.index)) { // the prompt opened it
    yield ["reasoning", from, UNOPENED.lastIndex];
    OPENS.lastIndex = UNOPENED.lastIndex;
    opened = OPENS.exec(body);
  }
  while (opened) {
    const [kind, close] = BLOCKS.get(opened[0]);
    const at = close ? body.indexOf(close, opened.index) : -1;
    const stop = at < 0 ? body.length : at + close.length;
    yield [kind, opened.index, stop];
    OPENS.lastIndex = stop; // another call may have used it meanwhile
    opened = OPENS.exec(body);
  }
}
