"""Import of verl runs from metric files, console output, and folders of dumped generations.

verl's step time includes that of a checkpoint, and in versions such as 00401103 that of a validation (in 0094eb20 it is
separate). If the other phases of a row leave room for them, they are subtracted from `timing_s/step` and
`perf/time_per_step`, and `perf/throughput` is computed from the remaining time, so that such steps are not jumps.

Sources: `FileLogger` and `LocalLogger` in verl/utils, `fit` and `_dump_generations` in verl/trainer/ppo/ray_trainer.py.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import DataError
from rl_metrics.importers.dumped import StepResponses, numbers, step_files, whole_rows
from rl_metrics.importers.recognition import misplaced, require_there
from rl_metrics.importers.run_writer import Imported, ImportedMetrics, Names, require_free, translation, write_run
from rl_metrics.importers.verl_console import bars_of_line, printed_samples, seems_step, step_of_line
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
    require_free(into)
    metrics = ImportedMetrics()
    printed: list[StepResponses] = []
    for file in files:
        require_there(file, wanted="a file of verl's metrics or console")
        if file.is_dir():
            raise DataError(misplaced([file], trainer="verl") or FOLDER.format(path=file))
        lines = ((step, step_alone(values)) for step, values in read_log(file))
        metrics.add_launch(file, lines, names=translation(NAMES, has_our_names=True))
        samples = [(step, samples) for step, samples in printed_samples(file) if samples]
        if validation is None:
            printed += [StepResponses(step, validated=validated) for step, validated in samples]
        elif samples:
            count = sum(len(validated) for _, validated in samples)
            log.warning("printed_samples_passed_over", path=str(file), count=count, because="--validation has them")
    return write_run(
        into,
        trainer="verl",
        files=[*files, *(folder for folder in (rollouts, validation) if folder is not None)],
        metrics=metrics,
        responses=itertools.chain(
            printed,
            (StepResponses(step, _dumped(file), written=file.stat().st_mtime) for step, file in _dumps(rollouts)),
            (StepResponses(step, validated=_dumped(file)) for step, file in _dumps(validation)),
        ),
    )


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


def read_log(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield steps and values of a file of the file logger or console, and warn about skipped lines with values.

    Metrics of progress bars count only if the file has no others. A last line of the console without a line break is
    skipped, because its last number may be truncated.
    """
    without_step: list[int] = []
    passed_over: list[int] = []
    bars: dict[int, dict[str, float]] = {}
    has_steps = False
    for number, (read, is_ended) in enumerate(read_lines(file), start=1):
        line = read.removeprefix(BYTE_ORDER_MARK).lstrip()
        logged: tuple[int, dict[str, Any]] | None = None
        if line.startswith(b"{"):
            row = parse_line(line) or {}
            step = as_step(row.get("step"))
            if row.get("data") and isinstance(row["data"], dict):
                logged = None if step is None or step < 0 else (step, row["data"])
                without_step += [] if logged else [number]
        else:
            text = line.decode(errors="replace")
            may_be_step = is_ended and "step:" in text
            logged = step_of_line(text) if may_be_step else None
            if logged is None and may_be_step and seems_step(text):
                passed_over.append(number)
            elif logged is None and ("s/it, " in text or "it/s, " in text):
                bars |= bars_of_line(text)
        if logged is not None:
            has_steps = True
            yield logged
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


def _dumps(folder: Path | None) -> list[tuple[int, Path]]:
    return step_files(folder, "*.jsonl", name=r"([0-9]{1,18})\.jsonl", such_as="12.jsonl, one per step")


def _dumped(file: Path) -> list[dict[str, Any]]:
    """Return the generations in a file."""
    return [
        {
            "prompt": row["input"],
            "response": row["output"],
            "reward": number_or_nan(row.get("score")),
            "components": numbers(row, without=NOT_COMPONENTS),
            "ground_truth": row.get("gts"),
            "source": row["data_source"] if isinstance(row.get("data_source"), str) else "default",
        }
        for row in whole_rows(read_json_lines(file), file, needs=("input", "output"), of=str)
    ]
