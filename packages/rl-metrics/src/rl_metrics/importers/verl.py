"""Runs of verl: its metric files, its console, and the folders into which it dumps generations.

Sources: `FileLogger` and `LocalLogger` in verl/utils, `_dump_generations` in verl/trainer/ppo/ray_trainer.py.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_metrics.importers.dumped import MAX_ROWS, Dumped, as_rollouts, as_samples, numbers
from rl_metrics.importers.naming import SameAs, translation
from rl_metrics.importers.run_writer import Imported, RunWriter
from rl_metrics.json_lines import number_or_nan, parse_line, read_json_lines, read_lines
from rl_metrics.trackers.jsonl import is_step

MISMATCH = (
    *("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
)
WEIGHTS = ("mean", "std", "max", "min", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")

NAMES = (
    SameAs("actor/entropy_loss", ("actor/entropy",)),  # until 2025
    SameAs("actor/reward_kl_penalty", ("actor/reference_kl",)),
    SameAs("actor/reward_kl_penalty_coeff", ("actor/kl_coef",)),
    SameAs("mfu/{role}", ("perf/mfu/{role}",)),
    *(SameAs(f"mismatch/mismatch_{name}", (f"rollout_corr/{name}",)) for name in MISMATCH),  # 0.6
    *(SameAs(f"mismatch/rollout_is_{name}", (f"rollout_corr/rollout_is_{name}",)) for name in WEIGHTS),
    SameAs("val/test_score/{source}", ("val-core/{source}/reward/mean@1",)),
)
"""verl's names that are not ours; the mean of n responses has the same expectation for each n, so an unknown n is 1."""

NOT_COMPONENTS = frozenset({"step", "score", "input", "output", "gts", "reward", "index", "uid", "request_id"})

FOLDER = (
    "{path} must be a file of verl's metrics or console, not a folder. Folders of generations go elsewhere: its "
    "trainer.rollout_data_dir to --rollouts (rollouts=...), its trainer.validation_data_dir to --validation."
)

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP_LINE = re.compile(r"(?:^|[\s)\]])step:(\d{1,18}) - (\S.*)")
VALUE = re.compile(r"(?:(?:np|numpy)\.\w+\()?([^()\s]+)\)?")


def import_verl(
    files: Sequence[Path], into: Path, *, rollouts: Path | None = None, validation: Path | None = None
) -> Imported:
    """Write the folder of a run of verl.

    Args:
        files: JSON lines of its file logger, or what its console said, in the order of the run's attempts: a resumed
            one takes the place of the steps that it repeats.
        into: Folder of the run; new, or of an earlier import.
        rollouts: Its `trainer.rollout_data_dir`.
        validation: Its `trainer.validation_data_dir`.

    Raises:
        DataError: There is nothing of verl in the files, or the folder is another's.
        OSError: A file cannot be read.
    """
    with RunWriter(into, trainer="verl", names=translation(NAMES, has_our_names=True)) as run:
        for file in files:
            if file.is_dir():
                raise DataError(FOLDER.format(path=file))
            run.begin_attempt(file)
            for line, is_ended in read_lines(file):
                read = logged(line, is_ended=is_ended)
                if read is not None:
                    run.add_metrics(*read)
        for step, file in _dumps(rollouts):
            run.add_rollouts(as_rollouts(step, _dumped(file)), written=file.stat().st_mtime)
        for step, file in _dumps(validation):
            run.add_generations(step, as_samples(step, _dumped(file), trainer="verl"))
        folders = [folder for folder in (rollouts, validation) if folder is not None]
        return run.finish([*files, *folders])


def logged(line: bytes, *, is_ended: bool) -> tuple[int, dict[str, Any]] | None:
    """Step and values of a line of the file logger, or of the console; None when it has none.

    Args:
        line: Without its end.
        is_ended: False for a last line without end: on the console its last number may be torn.
    """
    if line.startswith(b"{"):
        row = parse_line(line)
        if row is None or not is_step(row.get("step")) or not isinstance(row.get("data"), dict):
            return None
        return row["step"], row["data"]
    if not is_ended or b"step:" not in line:
        return None
    found = STEP_LINE.search(ESCAPES.sub("", line.decode(errors="replace")))
    if found is None:
        return None
    values = {name: value for part in found[2].split(" - ") for name, value in _console_metric(part)}
    return (int(found[1]), values) if values else None


def _console_metric(part: str) -> Iterator[tuple[str, float]]:
    name, _, written = part.rpartition(":")
    value = VALUE.fullmatch(written.strip())
    if name and value:
        try:
            yield name.strip(), float(value[1])
        except ValueError:
            return


def _dumps(folder: Path | None) -> list[tuple[int, Path]]:
    """Files of steps in a folder of generations, by rising step."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise DataError(f"{folder} must be a folder with files such as 12.jsonl, one for each step.")
    files = [file for file in folder.glob("*.jsonl") if re.fullmatch(r"[0-9]{1,18}", file.stem) and file.is_file()]
    return sorted((int(file.stem), file) for file in files)


def _dumped(file: Path) -> list[Dumped]:
    """The generations in a file."""
    rows = (row for row in read_json_lines(file) if _is_text(row.get("input")) and _is_text(row.get("output")))
    return [
        Dumped(
            prompt=row["input"],
            response=row["output"],
            reward=number_or_nan(row.get("score")),
            components=numbers(row, without=NOT_COMPONENTS),
            ground_truth=None if row.get("gts") is None else str(row["gts"]),
            source=row["data_source"] if _is_text(row.get("data_source")) else "default",
        )
        for row in itertools.islice(rows, MAX_ROWS)
    ]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
