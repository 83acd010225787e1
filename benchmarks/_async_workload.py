"""Workload of benchmarks/async.py: lengths, costs, and a lower bound of the time for any schedule."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tomli_w

from rl_rollout.simulation import GroupLengths, Workload, workload_from

SCRIPT = "script.json"
QUICK: dict[str, dict[str, int]] = {
    "benchmark": {"steps": 4, "sync_steps": 1},
    "batch": {"groups": 4, "group_size": 4, "mini_batch_groups": 4},
    "lengths": {"maximum": 64},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the runs.

    Attributes:
        gpus: GPUs of each side.
        rollout_gpus: GPUs of the asynchronous side that generate; the others train.
        steps: Steps of the asynchronous side.
        sync_steps: Steps of the synchronous side.
        max_staleness: Maximum staleness of the asynchronous side.
        seed: Seed of lengths and prompt order in the first round.
    """

    gpus: int
    rollout_gpus: int
    steps: int
    sync_steps: int
    max_staleness: int
    seed: int


def read_plan(file: Path) -> tuple[Plan, Workload]:
    """Read the benchmark's file: its plan, and a workload in the format of `rl-async-trainer simulate`."""
    table = tomllib.loads(file.read_text())
    plan = Plan(**table.pop("benchmark"))
    return plan, workload_from({"name": file.stem, **table}, where=str(file))


def write_quick_file(source: Path, target: Path) -> None:
    """Return the benchmark's file with a few steps of short responses."""
    table = tomllib.loads(source.read_text())
    for section, changes in QUICK.items():
        table[section] |= changes
    target.write_text(tomli_w.dumps(table))


@dataclass(frozen=True, kw_only=True)
class Script:
    """Script of the engines and the learner of one run, a file in the policy's folder.

    Attributes:
        file: File with the workload.
        trace: Folder of the traces.
        seed: Seed of the lengths.
        num_engines: Number of engines with one GPU each.
        train_gpus: GPUs of the learner.
    """

    file: Path
    trace: Path
    seed: int
    num_engines: int
    train_gpus: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the script from a policy's folder."""
        content: dict[str, Any] = json.loads((folder / SCRIPT).read_text())
        return cls(**content | {name: Path(content[name]) for name in ("file", "trace")})

    def write(self, folder: Path) -> None:
        """Write the script into a policy's folder."""
        (folder / SCRIPT).write_text(json.dumps(asdict(self), default=str))

    @cached_property
    def workload(self) -> Workload:
        """Of the file."""
        return read_plan(self.file)[1]

    @cached_property
    def lengths(self) -> GroupLengths:
        """Return the response tokens of a prompt by its number."""
        return GroupLengths(self.workload.lengths, group_size=self.workload.batch.group_size, seed=self.seed)

    @property
    def token_s(self) -> float:
        """Return the seconds per token."""
        return self.workload.engine.step_seconds()[1]

    def train_s(self, num_tokens: int) -> float:
        """Return the seconds of training on a number of tokens."""
        return self.workload.learner.updates_seconds(num_tokens, num_updates=1, gpus=self.train_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bounds of a run's time for any schedule, for three reasons; the largest counts.

    Attributes:
        training_s: The first step's rollouts and all training after them.
        generation_s: All tokens with every slot always in use, and the last step.
        longest_s: The longest response and a step.
    """

    training_s: float
    generation_s: float
    longest_s: float

    @property
    def seconds(self) -> float:
        """The largest bound."""
        return max(self.training_s, self.generation_s, self.longest_s)


def bound_of(script: Script, groups: Sequence[int], *, groups_per_step: int, num_startable: int) -> Bound:
    """Return the bound of a run in which engines and learner have separate GPUs.

    It counts only decoding and training, not weight updates, the queue or the trainer. It ignores the limit on
    staleness, except at the start, when only the first groups may be started.

    Args:
        script: The lengths and costs.
        groups: Numbers of the prompts that are trained, in the order of issue.
        groups_per_step: Groups per step.
        num_startable: Number of groups that may be started before the first step is trained.
    """
    lengths, num_prompt = script.lengths, script.workload.lengths.prompt_tokens
    num_slots = script.num_engines * script.workload.engine.slots
    responses = [lengths[group] for group in groups]

    def least(values: Iterable[int]) -> list[int]:
        return sorted(values)[:groups_per_step]

    first = responses[:num_startable]
    fill_s = script.token_s * max(least(map(max, first))[-1], sum(least(map(sum, first))) / num_slots)
    trained = [sum(row) + len(row) * num_prompt for row in responses]
    last_step_s = script.train_s(sum(least(trained)))
    generated_s = script.token_s * sum(map(sum, responses)) / num_slots
    return Bound(
        training_s=fill_s + script.train_s(sum(trained)),
        generation_s=generated_s + last_step_s,
        longest_s=script.token_s * max(map(max, responses)) + last_step_s,
    )
