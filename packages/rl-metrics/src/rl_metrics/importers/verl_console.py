"""Steps, progress bars and samples in verl's console output.

A step is a line such as `(TaskRunner pid=1) step:3 - actor/entropy:0.4 - actor/lr:1e-06`. The console also has a
model's responses, so a line counts only if nothing but log prefixes precedes the step.

A sample, printed by a validation, has `[prompt]`, `[response]` and `[ground_truth]`, each followed by text, and then a
number for each part of the reward, such as `[score] 1.0`. The line of the step follows.

Sources: `concat_dict_to_str` in verl/utils/logger/aggregate_logger.py, `NaiveRewardManager` in
verl/workers/reward_manager/naive.py.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from rl_metrics.run_files.json_lines import read_lines

log = structlog.get_logger(__name__)

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RAY_PREFIX = r"\((?:\S+ )?pid=\d+(?:, ip=[^()\s,]+)?\)"
RAY = re.compile(rf"^{RAY_PREFIX} ?")
PREFIX = re.compile(
    "|".join(
        (
            r"\s+",
            RAY_PREFIX,
            r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?",
            r"[^|\r]*\d%\|[^|\r]*\|[^|\r\[\]]*\[[^\r\[\]]*\]",  # a bar of tqdm
            r"[^|\r]*\d%\|[^\r]*\r",  # the same, overwritten before it was complete
            r"\d+it \[[^\r\[\]]*\]",  # a bar without an end
        )
    )
)
STEP = re.compile(r"step:(\d{1,18}) - (\S.*)")
STEP_ANYWHERE = re.compile(rf"(?:^|[\s)\]]){STEP.pattern}")
REPEATED = re.compile(r"\[repeated \d+x across cluster\].*")

BAR = re.compile(
    r"(?:[^|\r]*\d%\|[^|\r]*\| *)?(?P<step>\d{1,18})(?:/\d+|it) \[[^\r\[\],]*, *[\d.?]+(?:s/it|it/s)"
    r"(?P<postfix>(?:, *[^\r\[\],=]+=[^\r\[\],]*)+)\]"
)
"""A bar of tqdm with metrics after its rate, such as `3/20 [00:30<02:50, 10.0s/it, loss=0.1, kl=0.002]`."""

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
METRIC = re.compile(rf"\s*(\S.*):\s*(?:({NUMBER})|[\w.]+\(({NUMBER})(?:,[^()]*)?\))\s*")
PROMPT = re.compile(r"^\[prompt\] ?", re.MULTILINE)
FIELD = r"\[([A-Za-z_][\w .@/-]{0,60})\] ?([^\n]*)\n"
SAMPLE = re.compile(rf"(.*?)\n\[response\] ?(.*?)\n\[ground_truth\] ?(.*?)\n((?:{FIELD})+)", re.DOTALL)
"""A sample, after its first field's name."""

VERL_NAME = re.compile(r"[^\s/]+(?:/[^\s/]+)+")


def step_of_line(line: str) -> tuple[int, dict[str, float]] | None:
    """Return step and values of a complete line, or None without them."""
    line = ESCAPES.sub("", line)
    at = 0
    while found := PREFIX.match(line, at):
        at = found.end()
    return _step(STEP.match(line, at))


def seems_step(line: str) -> bool:
    """Return whether a line has a step of verl, whatever precedes it."""
    return _step(STEP_ANYWHERE.search(ESCAPES.sub("", line))) is not None


def bars_of_line(line: str) -> dict[int, dict[str, float]]:
    """Return the metrics in the progress bars of a line, by the number of finished steps."""
    found: dict[int, dict[str, float]] = {}
    for drawn in ESCAPES.sub("", line).split("\r"):
        bar = BAR.fullmatch(RAY.sub("", drawn).strip())
        if bar is not None:
            pairs = (one.split("=", 1) for one in bar["postfix"].strip(", ").split(","))
            numbers = {name.strip(): value.strip() for name, value in pairs}
            found[int(bar["step"])] = {name: float(v) for name, v in numbers.items() if re.fullmatch(NUMBER, v)}
    return found


def _step(found: re.Match[str] | None) -> tuple[int, dict[str, float]] | None:
    if found is None:
        return None
    parts = (METRIC.fullmatch(part) for part in REPEATED.sub("", found[2]).split(" - "))
    values = {part[1].strip(): float(part[2] or part[3]) for part in parts if part}
    return (int(found[1]), values) if any(map(VERL_NAME.fullmatch, values)) else None


def printed_samples(file: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the samples of each step in a console's output, and warn about those that are left out."""
    lines: list[str] = []  # since the first prompt after the last step
    num_incomplete = 0
    for line, _ in read_lines(file):
        text = RAY.sub("", ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r"), count=1)
        step = step_of_line(text)
        if step is None and (lines or PROMPT.match(text)):
            lines.append(text)
        elif step is not None:
            samples = _samples(lines)
            num_incomplete += samples.count(None)
            yield step[0], [sample for sample in samples if sample is not None]
            lines.clear()
    num_left = len(_samples(lines))
    if num_incomplete or num_left:
        left_out = {"incomplete": num_incomplete, "without_a_step_after_them": num_left}
        log.warning("printed_samples_passed_over", path=str(file), **left_out)


def _samples(lines: list[str]) -> list[dict[str, Any] | None]:
    """Return the samples in lines of a console; None for an incomplete one."""
    samples: list[dict[str, Any] | None] = []
    for text in PROMPT.split("".join(f"{line}\n" for line in lines))[1:]:
        match = SAMPLE.match(text)
        numbers = {} if match is None else {name: _number(number) for name, number in re.findall(FIELD, match[4])}
        known = {name: number for name, number in numbers.items() if not math.isnan(number)}
        if match is None or not known:
            samples.append(None)
            continue
        texts = {"prompt": match[1], "response": match[2], "ground_truth": match[3]}
        samples.append({**texts, "reward": known.pop("score", math.nan), "components": known})
    return samples


def _number(text: str) -> float:
    try:
        return {"True": 1.0, "False": 0.0}.get(text.strip(), math.nan) if text.strip().isalpha() else float(text)
    except ValueError:
        return math.nan
