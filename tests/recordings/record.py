"""Create the recordings of tests/test_recordings.py from runs of examples, misconfigured or not.

    python tests/recordings/record.py [NAME ...] [--steps N] [--runs FOLDER]

Each run trains with real vLLM and real Megatron (about two minutes on two cores), in a folder of `--runs`. The parts
that health and doctor read are then written to tests/recordings/NAME, reduced in size. It needs the examples' prepared
folders (`nox -s train` and examples/distillation/run.py make them).
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.weights.update import WeightReceipt, WeightUpdate

HERE = Path(__file__).parent
EXAMPLE = Path("examples/arithmetic/settings.toml")
DISTILLATION = Path("examples/distillation/settings.toml")
MISCONFIGURED = "tests/recordings/misconfigured.py"
DIGITS = {"metrics.jsonl": 4, "events.jsonl": 4, "rollouts.jsonl": 6}
"""Significant digits to keep."""

ROLLOUTS_EVERY = 4
"""Interval of steps whose trajectories are kept."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run to record.

    Attributes:
        example: Its settings.
        settings: Beside those of the example.
        steps: It trains.
        fault: Done to this process before the run.
    """

    example: Path = EXAMPLE
    settings: tuple[str, ...] = ()
    steps: int = 60
    fault: Callable[[], None] | None = None


def keep_first_weights() -> None:
    """From the third update on the engine says that it took the weights, and goes on with those that it had."""
    from rl_rollout.engines.scripted import honest_receipt
    from rl_rollout.engines.vllm.stepper import VLLMStepper

    take = VLLMStepper.update_weights

    def update_weights(self: VLLMStepper, update: WeightUpdate) -> WeightReceipt:
        if update.version < 2:
            return take(self, update)
        self._version = update.version
        return honest_receipt(update)

    VLLMStepper.update_weights = update_weights  # type: ignore[method-assign]


def reward(name: str) -> str:
    """The setting of a reward that is misconfigured."""
    return f"--reward.function={MISCONFIGURED}:{name}"


RECORDINGS = {
    "healthy_0": Recording(),
    "healthy_1": Recording(settings=("--run.seed=1",)),
    "healthy_2": Recording(settings=("--run.seed=2",)),
    "healthy_distillation": Recording(example=DISTILLATION),
    "learning_rate_too_high": Recording(settings=("--optimizer.learning_rate=3e-3",)),
    "reward_zero": Recording(settings=(reward("never_right"),)),
    "stale_weights": Recording(settings=("--trainer.proof_tolerance=100",), fault=keep_first_weights),
    "kl_too_strong": Recording(settings=("--algorithm.kl_coefficient=10",)),
    "entropy_collapse": Recording(
        settings=("--algorithm.entropy_coefficient=-20", "--optimizer.learning_rate=2e-4"), steps=100
    ),
    "truncated_responses": Recording(settings=("--rollout.max_response_tokens=3",)),
    "slow_reward": Recording(settings=(reward("slow"), "--reward.max_concurrency=16"), steps=20),
    "memory_leak": Recording(settings=(reward("leaking"), "--metrics.details_every=1")),
}


def main() -> int:
    """Record what is named, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RECORDINGS], help="all, where none is named")
    parser.add_argument("--steps", type=int, help="train this long instead")
    parser.add_argument("--runs", type=Path, default=Path("runs/recordings"))
    parser.add_argument("--here", action="store_true", help="train in this process")
    words = parser.parse_args()
    if words.here:
        return train(words.names[0], words.runs, words.steps)
    for name in words.names or RECORDINGS:
        sys.stdout.write(f"recording {name}\n")
        sys.stdout.flush()
        steps = [] if words.steps is None else ["--steps", str(words.steps)]
        subprocess.run([sys.executable, __file__, name, "--here", "--runs", str(words.runs), *steps], check=False)
        keep(words.runs / name, HERE / name)
    return 0


def train(name: str, runs: Path, steps: int | None) -> int:
    """One run, in this process."""
    from rl_sync_trainer.main import main as rl_sync_trainer

    recording = RECORDINGS[name]
    if recording.fault is not None:
        recording.fault()
    return rl_sync_trainer(
        [
            *("train", str(recording.example), f"--run.directory={runs}", f"--run.name={name}"),
            *(f"--trainer.steps={steps or recording.steps}", "--trainer.checkpoint_every=1000"),
            *("--metrics.console=lines", "--metrics.report=false"),
            *recording.settings,
        ]
    )


def keep(run: Path, folder: Path) -> None:
    """Write small what a run wrote."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    place = str(run.parent)
    (folder / "settings.toml").write_text((run / "settings.toml").read_text().replace(place, "runs/recordings"))
    for name, digits in DIGITS.items():
        with (folder / name).open("w") as file:
            for line in lines(run / name):
                if name == "rollouts.jsonl" and line["step"] % ROLLOUTS_EVERY != 0:
                    continue
                text = json.dumps(rounded(line, digits), separators=(",", ":"), ensure_ascii=False)
                file.write(text.replace(place, "runs/recordings") + "\n")


def lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a JSONL file."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def rounded(value: Any, digits: int) -> Any:
    """The value with fewer digits, all through; times stay as they are."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}") if abs(value) < 10**8 else value
    if isinstance(value, list):
        return [rounded(part, digits) for part in value]
    if isinstance(value, dict):
        return {name: rounded(part, digits) for name, part in value.items()}
    return value


if __name__ == "__main__":
    sys.exit(main())
