"""Samples that verl prints to its console while it validates.

A block has `[prompt]`, `[response]` and `[ground_truth]`, each followed by text, and then a number for each part of the
reward, such as `[score] 1.0`. The line of the step follows.

Source: `NaiveRewardManager` in verl/workers/reward_manager/naive.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from rl_metrics.importers.dumped import MAX_ROWS, Dumped
from rl_metrics.importers.verl_console import ESCAPES, RAY, step_of_line
from rl_metrics.run_files.json_lines import read_lines

log = structlog.get_logger(__name__)

TEXTS = ("prompt", "response", "ground_truth")
FOLLOWING = {"prompt": "response", "response": "ground_truth"}
FIELD = re.compile(r"\[([A-Za-z_][\w .@/-]{0,60})\](?: (.*))?", re.DOTALL)


@dataclass(slots=True)
class _Block:
    """A block while it is read.

    Attributes:
        texts: Lines of the texts so far, by name; each text ends where the next one begins.
        numbers: Parts of the reward.
    """

    texts: dict[str, list[str]]
    numbers: dict[str, float] = field(default_factory=dict)

    def takes(self, line: str) -> bool:
        """Add a line, and return whether it belongs to the block."""
        found = FIELD.fullmatch(line)
        name = None if found is None else found[1]
        following = FOLLOWING.get([*self.texts][-1])
        if found is not None and name == following:
            self.texts[found[1]] = [found[2] or ""]
        elif found is not None and following is None:
            self.numbers[found[1]] = _number(found[2] or "")
        elif self.numbers:
            return False
        else:
            [*self.texts.values()][-1].append(line)
        return True

    def sample(self) -> Dumped | None:
        """The sample; None if the block is incomplete."""
        numbers = {name: value for name, value in self.numbers.items() if not math.isnan(value)}
        if len(self.texts) < len(TEXTS) or not numbers:
            return None
        prompt, response, truth = ("\n".join(self.texts[name]) for name in TEXTS)
        reward = numbers.pop("score", math.nan)
        return Dumped(prompt=prompt, response=response, ground_truth=truth, reward=reward, components=numbers)


def printed_samples(file: Path) -> Iterator[tuple[int, list[Dumped]]]:
    """Yield the samples of each step in a console's output, and warn about those that are left out."""
    block: _Block | None = None
    waiting: list[Dumped] = []
    num_incomplete = num_too_many = 0
    for line, _ in read_lines(file):
        text = RAY.sub("", ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r"), count=1)
        step = step_of_line(text)
        is_new = text.startswith("[prompt]")
        if block is not None and (step is not None or is_new or not block.takes(text)):
            sample = block.sample()
            num_incomplete += sample is None
            num_too_many += sample is not None and len(waiting) >= MAX_ROWS
            waiting += [sample] if sample is not None and len(waiting) < MAX_ROWS else []
            block = None
        if is_new:
            block = _Block({"prompt": [text.removeprefix("[prompt]").removeprefix(" ")]})
        if step is not None:
            yield step[0], waiting
            waiting = []
    left_out = {
        "incomplete": num_incomplete,
        "more_than_fit_a_step": num_too_many,
        "without_a_step_after_them": len(waiting) + (block is not None),
    }
    if any(left_out.values()):
        log.warning("printed_samples_passed_over", path=str(file), **left_out)


def _number(text: str) -> float:
    try:
        return {"True": 1.0, "False": 0.0}.get(text.strip(), math.nan) if text.strip().isalpha() else float(text)
    except ValueError:
        return math.nan
