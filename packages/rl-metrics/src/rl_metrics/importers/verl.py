"""Import of verl runs from metric files, console output, and folders of dumped generations.

verl's step time includes that of a checkpoint, and in versions such as 00401103 that of a validation (in 0094eb20 it is
separate). If the other phases of a row leave room for them, they are subtracted from `timing_s/step` and
`perf/time_per_step`, and `perf/throughput` is computed from the remaining time, so that such steps are not jumps.

Sources: `FileLogger` and `LocalLogger` in verl/utils, `fit` and `_dump_generations` in verl/trainer/ppo/ray_trainer.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import DataError
from rl_metrics.importers.dumped import Dumped, as_rollouts, as_samples, numbers, step_files, whole_rows
from rl_metrics.importers.naming import Names, translation
from rl_metrics.importers.recognition import misplaced, require_there
from rl_metrics.importers.run_writer import Imported, RunWriter
from rl_metrics.importers.verl_console import bars_of_line, seems_step, step_of_line
from rl_metrics.importers.verl_samples import printed_samples
from rl_metrics.run_files.json_lines import number_or_nan, parse_line, read_json_lines, read_lines
from rl_metrics.trackers.jsonl import as_step, warn_of_lines_without_step

log = structlog.get_logger(__name__)

MISMATCH = (
    *("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
)
PARTS_OF_LOOPS = ("generate_sequences", "tool_calls", "compute_score", "num_preempted")
AGENT_LOOPS = (
    *(f"{part}/{of}" for part in PARTS_OF_LOOPS for of in ("mean", "max", "min")),
    *(f"slowest/{part}" for part in (*PARTS_OF_LOOPS, "prompt_length", "response_length")),
)
WEIGHTS = ("mean", "std", "max", "min", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")

NAMES: Names = {
    "actor/entropy_loss": ("actor/entropy",),  # until 2025
    "actor/reward_kl_penalty": ("actor/reference_kl",),
    "actor/reward_kl_penalty_coeff": ("actor/kl_coef",),
    "critic/kl": ("actor/reference_kl",),  # until 2025
    "critic/kl_coeff": ("actor/kl_coef",),
    "mfu/{role}": ("perf/mfu/{role}",),
    **{f"mismatch/mismatch_{name}": (f"rollout_corr/{name}",) for name in MISMATCH},  # 0.6
    **{f"mismatch/rollout_is_{name}": (f"rollout_corr/rollout_is_{name}",) for name in WEIGHTS},
    "val/test_score/{source}": ("val-core/{source}/reward/mean@1",),
    **{f"timing_s/agent_loop/{name}": (f"agent_loop/{name}",) for name in AGENT_LOOPS},
    **{name: (f"actor/{name}",) for name in ("loss", "entropy", "grad_norm", "lr")},  # of progress bars
    "reward": ("critic/rewards/mean",),
    "adv": ("critic/advantages/mean",),
}
"""verl's names that differ from ours. The mean of n responses has the same expectation for each n; an unknown n is 1.
"""

NOT_COMPONENTS = frozenset({"step", "score", "input", "output", "gts", "reward", "index", "uid", "request_id"})

FOLDER = (
    "{path} must be a file of verl's metrics or console, not a folder. Pass folders of generations separately: "
    "trainer.rollout_data_dir as --rollouts (rollouts=...), trainer.validation_data_dir as --validation."
)

STEP_TIMES = ("timing_s/step", "perf/time_per_step")
NOT_OF_A_STEP = ("timing_s/save_checkpoint", "timing_s/testing")
"""Phases to subtract; the first is within the step in more versions, so it is tried first."""

PHASES = (
    *("gen", "gen_max", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("update_weights", "dump_rollout_generations"),
)
"""Sequential phases of a step."""

ROUNDING = 0.01
"""Share of a step by which its phases may exceed it."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def import_verl(
    files: Sequence[Path], into: Path, *, rollouts: Path | None = None, validation: Path | None = None
) -> Imported:
    """Write the folder of a run of verl.

    Args:
        files: JSON lines of its file logger, or its console output, in the order of the run's launches; a resumed
            launch replaces the steps that it repeats.
        into: Folder of the run; new, or of an earlier import.
        rollouts: The folder `trainer.rollout_data_dir`.
        validation: The folder `trainer.validation_data_dir`.

    Raises:
        DataError: The files have no data of verl, or the folder has other contents.
        OSError: A file cannot be read.
    """
    with RunWriter(into, trainer="verl", names=translation(NAMES, has_our_names=True)) as run:
        for file in files:
            require_there(file, wanted="a file of verl's metrics or console")
            if file.is_dir():
                raise DataError(misplaced([file], trainer="verl") or FOLDER.format(path=file))
            run.begin_attempt(file)
            for step, values in _logged(file):
                run.add_metrics(step, step_alone(values))
            _add_printed(run, file, is_wanted=validation is None)
        for step, file in _dumps(rollouts, "*.jsonl"):
            run.add_rollouts(as_rollouts(step, _dumped(file)), written=file.stat().st_mtime)
        for step, file in _dumps(validation, "*.jsonl"):
            run.add_generations(step, as_samples(step, _dumped(file), trainer="verl"))
        folders = [folder for folder in (rollouts, validation) if folder is not None]
        return run.finish([*files, *folders])


def _add_printed(run: RunWriter, file: Path, *, is_wanted: bool) -> None:
    """Add the samples that a console printed, or warn that a folder of all samples replaces them."""
    num_replaced = 0
    for step, printed in printed_samples(file):
        if is_wanted:
            run.add_generations(step, as_samples(step, printed, trainer="verl"))
        else:
            num_replaced += len(printed)
    if num_replaced:
        log.warning("printed_samples_passed_over", path=str(file), count=num_replaced, because="--validation has them")


def logged(line: bytes, *, is_ended: bool) -> tuple[int, dict[str, Any]] | None:
    """Return step and values of a line of the file logger or console, or None without them.

    Args:
        line: The line without its line break.
        is_ended: False for a last line without a line break, whose last number may be truncated on the console.
    """
    line = _bare(line)
    if _is_json(line):
        row = _row(line)
        step = None if row is None else as_step(row["step"])
        return None if row is None or step is None or step < 0 else (step, row["data"])
    return step_of_line(line.decode(errors="replace")) if is_ended and b"step:" in line else None


def step_alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a step, without the time of its checkpoint and validation if its time included them."""
    alone = dict(values)
    step = number_or_nan(values.get("timing_s/step"))
    room = step * (1 + ROUNDING) - _sum(values, [f"timing_s/{phase}" for phase in PHASES])
    extra = 0.0
    for name in NOT_OF_A_STEP:
        seconds = _sum(values, [name])
        if extra + seconds < min(room, step):
            extra += seconds
    if not extra:
        return alone
    for name in STEP_TIMES:
        if number_or_nan(values.get(name)) > extra:
            alone[name] = values[name] - extra
    if number_or_nan(values.get("perf/throughput")) > 0:
        alone["perf/throughput"] = values["perf/throughput"] * step / (step - extra)
    return alone


def _sum(values: Mapping[str, Any], names: Sequence[str]) -> float:
    """Return the sum of the existing positive times, in seconds."""
    seconds = (number_or_nan(values.get(name)) for name in names)
    return sum(one for one in seconds if one > 0)


def _logged(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield steps and values of a file, and warn about skipped lines with values.

    Metrics of progress bars count only if the file has no others.
    """
    without_step: list[int] = []
    passed_over: list[int] = []
    bars: dict[int, dict[str, float]] = {}
    has_steps = False
    for number, (line, is_ended) in enumerate(read_lines(file), start=1):
        read = logged(line, is_ended=is_ended)
        if read is not None:
            has_steps = True
            yield read
        elif _is_json(_bare(line)):
            without_step += [number] if _row(_bare(line)) else []
        elif is_ended and b"step:" in line and seems_step(line.decode(errors="replace")):
            passed_over.append(number)
        elif b"s/it, " in line or b"it/s, " in line:
            bars |= bars_of_line(line.decode(errors="replace"))
    if bars and has_steps:
        log.warning("progress_bars_passed_over", path=str(file), steps=len(bars), because="the file has lines of steps")
    elif bars:
        yield from sorted(bars.items())
    if without_step:
        warn_of_lines_without_step(file, count=len(without_step), first_line=without_step[0])
    if passed_over:
        log.warning(
            "console_lines_passed_over",
            path=str(file),
            count=len(passed_over),
            first_line=passed_over[0],
            advice="they seem to be text that contains a step; if they are metrics, cut the text before step:",
        )


def _bare(line: bytes) -> bytes:
    return line.removeprefix(BYTE_ORDER_MARK).lstrip()


def _is_json(line: bytes) -> bool:
    return line.startswith(b"{")


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a row of the file logger, whatever its step is."""
    row = parse_line(line)
    return {"step": None, **row} if row is not None and row.get("data") and isinstance(row["data"], dict) else None


_dumps = partial(step_files, name=r"([0-9]{1,18})\.jsonl", such_as="12.jsonl, one per step")


def _dumped(file: Path) -> list[Dumped]:
    """Return the generations in a file."""
    rows = whole_rows(read_json_lines(file), file, needs=("input", "output"), of=str)
    return [
        Dumped(
            prompt=row["input"],
            response=row["output"],
            reward=number_or_nan(row.get("score")),
            components=numbers(row, without=NOT_COMPONENTS),
            ground_truth=row.get("gts"),
            source=row["data_source"] if _is_text(row.get("data_source")) else "default",
        )
        for row in rows
    ]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
