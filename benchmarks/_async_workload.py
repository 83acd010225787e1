"""What benchmarks/async.py runs: the drawn lengths, what each thing costs, and the time that no schedule can beat."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tomli_w

from rl_rollout.simulation import GroupLengths, Workload, parse_workload

SCRIPT = "script.json"
QUICK: dict[str, dict[str, int]] = {
    "benchmark": {"steps": 4, "sync_steps": 1},
    "batch": {"groups": 4, "group_size": 4, "mini_batch_groups": 4},
    "lengths": {"maximum": 64},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the workload is run.

    Attributes:
        gpus: Of either side.
        rollout_gpus: Those of the asynchronous side that generate; the others train.
        steps: Of the asynchronous side.
        sync_steps: Of the synchronous side.
        max_staleness: Of the asynchronous side.
        seed: Of lengths and prompt order, in the first round.
    """

    gpus: int
    rollout_gpus: int
    steps: int
    sync_steps: int
    max_staleness: int
    seed: int


def read_plan(file: Path) -> tuple[Plan, Workload]:
    """The benchmark's file: how it runs, and a workload as `rl-async-trainer simulate` has them."""
    table = tomllib.loads(file.read_text())
    plan = Plan(**table.pop("benchmark"))
    return plan, parse_workload(tomli_w.dumps({"name": file.stem, **table}), where=str(file))


def write_quick_file(source: Path, target: Path) -> None:
    """The benchmark's file with a few steps of short responses."""
    table = tomllib.loads(source.read_text())
    for section, changes in QUICK.items():
        table[section] |= changes
    target.write_text(tomli_w.dumps(table))


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the scripted engines and the scripted learner of one run are told, by a file in the policy's folder.

    Attributes:
        file: Has the workload.
        trace: Folder for what they did when.
        seed: Of the lengths.
        num_engines: Engines, each of a GPU.
        train_gpus: The learner's.
    """

    file: Path
    trace: Path
    seed: int
    num_engines: int
    train_gpus: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From a policy's folder."""
        content: dict[str, Any] = json.loads((folder / SCRIPT).read_text())
        return cls(**content | {name: Path(content[name]) for name in ("file", "trace")})

    def write(self, folder: Path) -> None:
        """Into a policy's folder."""
        (folder / SCRIPT).write_text(json.dumps(asdict(self), default=str))

    @cached_property
    def workload(self) -> Workload:
        """Of the file."""
        return read_plan(self.file)[1]

    @cached_property
    def lengths(self) -> GroupLengths:
        """Response tokens by the number of a prompt."""
        return GroupLengths(self.workload.lengths, group_size=self.workload.batch.group_size, seed=self.seed)

    @property
    def token_s(self) -> float:
        """Seconds of a token."""
        return self.workload.engine.step_seconds()[1]

    def train_s(self, num_tokens: int) -> float:
        """Seconds of training on so many tokens."""
        return self.workload.learner.updates_seconds(num_tokens, num_updates=1, gpus=self.train_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Times that no schedule of a run can beat, each for a reason of its own; the greatest counts.

    Attributes:
        training_s: The first step's rollouts, and all training after them.
        generation_s: All tokens in all slots all the time, and the last step.
        longest_s: The longest response, and a step.
    """

    training_s: float
    generation_s: float
    longest_s: float

    @property
    def seconds(self) -> float:
        """No run is shorter."""
        return max(self.training_s, self.generation_s, self.longest_s)


def bound_of(script: Script, groups: Sequence[int], *, groups_per_step: int, num_startable: int) -> Bound:
    """The bound of a run in which engines and learner have GPUs of their own.

    Everything but decoding and training is free in it: weight updates, the queue, the trainer. It knows nothing of the
    bound of staleness but for the beginning, when no group beyond the first ones may be started.

    Args:
        script: The lengths and costs.
        groups: Numbers of the prompts that are trained, in the order of issue.
        groups_per_step: Of them.
        num_startable: Groups that may be started before the first step is trained.
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
