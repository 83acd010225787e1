"""The command `validate` of both trainers: one policy on several files, or two policies on the same prompts."""

import asyncio
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.terminal_text import counted, json_text, table_lines
from rl_metrics.validation import PairedDifference, ValidationResponses, paired_differences, summarize_validation
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.models import check_engines, check_images, check_loop
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.evaluation import summarize_answers, validate_policy, validation_responses
from rl_trainer_parts.rollouts.inputs import Inputs, input_notes, read_inputs, shows_images, with_kept_images
from rl_trainer_parts.settings.schema import Settings

Say = Callable[[str], None]
ESTIMATE = re.compile(r"val-core/.+/((mean|pass|maj)@[0-9]+)(?:/mean)?", re.DOTALL)
ALPHA = 0.05


def data_files(words: Sequence[str]) -> dict[str, Path]:
    """Return the files of `[NAME=]FILE` by name, or by the name of the file without its ending.

    Raises:
        SettingsError: Two files have the same name.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, has_name, file = ("", "", word) if Path(word).exists() else word.rpartition("=")
        name = name if has_name else Path(file).stem
        if name in found:
            raise SettingsError(f"--data has two files named {name!r}: {found[name]} and {file}. Use --data NAME=FILE.")
        found[name] = Path(file)
    return found


def evaluate(policies: Mapping[str, Settings], data: Mapping[str, Path], json_file: Path | None, say: Say) -> None:
    """Evaluate policies and print their scores on each set; compare them if there are two.

    Args:
        policies: Settings of each policy, by its name.
        data: Files to evaluate, by name; empty takes validation and test of the settings.
        json_file: File for all metrics, of each whole set and of each data source in it.
        say: Prints notes and results.

    Raises:
        SettingsError: A setting is impossible, there is nothing to evaluate, or `json_file` cannot be written.
        DataError: A user's file cannot be used.
    """
    if json_file is not None:
        _check_writable(json_file)
    inputs = {name: _checked_inputs(settings, data, say) for name, settings in policies.items()}  # before models load
    responses: list[dict[str, ValidationResponses]] = []
    document: dict[str, Json] = {}
    for name, settings in policies.items():
        say(f"evaluating {name}")
        answers = _answered(settings, inputs[name])
        responses.append({of: validation_responses(one, source=of) for of, one in answers.items()})
        metrics = {of: summarize_validation(one) for of, one in responses[-1].items()}
        document[name] = {of: {"set": metrics[of], "sources": summarize_answers(answers[of])} for of in metrics}
        for line in (*_score_lines(metrics), *_failure_lines(answers)):
            say(line)
    compared = paired_differences(*responses) if len(responses) == 2 else {}
    for line in comparison_lines(list(policies), compared) if compared else ():
        say(line)
    for name in responses[0] if len(responses) == 2 else ():
        if name not in compared:
            say(f"note: {name} is not compared, because no prompt of it has a score of both policies.")
    if json_file is not None:
        comparison = {name: _with_nulls(asdict(one)) for name, one in compared.items()}
        json_file.write_text(json_text({"policies": document, "comparison": comparison}), encoding="utf-8")


def _check_writable(file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SettingsError(f"--json {file} cannot be written. Choose a file in an existing, writable folder.")


def _with_nulls(row: Mapping[str, float]) -> dict[str, Json]:
    """Replace infinite numbers, which JSON lacks."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _checked_inputs(settings: Settings, data: Mapping[str, Path], say: Say) -> Inputs:
    check_settings(settings)
    inputs = read_inputs(settings, data)
    if not inputs.evaluated:
        raise SettingsError("there is nothing to evaluate: use --data FILE, or set prompts.validation or prompts.test.")
    for note in input_notes(settings, inputs):
        say(f"note: {note}")
    check_images(settings, inputs)
    check_loop(settings, inputs.tokenizer)
    check_engines(settings, has_images=shows_images(settings, inputs))
    return inputs


def _answered(settings: Settings, inputs: Inputs) -> dict[str, list[Answer]]:
    with TemporaryDirectory(prefix="validate-") as folder:  # for images; the run's folder may be in use
        apart = settings.model_copy(update={"run": replace(settings.run, directory=Path(folder), name="run")})
        apart.run_folder.mkdir()
        return asyncio.run(validate_policy(apart, with_kept_images(apart, inputs)))


def _score_lines(metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the table of a policy's scores with their intervals."""
    rows = []
    for name, found in metrics.items():
        cells = dict.fromkeys(("mean", "pass", "maj"), "-")
        for metric, value in found.items():
            if metric.startswith(f"val-core/{name}/") and (match := ESTIMATE.fullmatch(metric)):
                stem = metric.removesuffix("/mean")
                low, high = (found.get(f"{stem}/ci_{end}", math.nan) for end in ("low", "high"))
                cells[match[2]] = f"{match[1]} {value:.3f}" + f" [{low:.3f}, {high:.3f}]" * (low <= high)
                fewer = found.get(f"{stem.replace('val-core', 'val-aux', 1)}/num_prompts")
                cells[match[2]] += "" if fewer is None else f" of {counted(int(fewer), 'prompt')}"
        rows.append((name, f"{found[f'val-aux/{name}/num_prompts']:.0f}", *cells.values()))
    yield from table_lines(("set", "prompts", "mean", "pass@k", "majority"), rows, right=("prompts",))


def _failure_lines(answers: Mapping[str, Sequence[Answer]]) -> Iterator[str]:
    for name, found in answers.items():
        failures = [one.failure for one in found if one.failure is not None]
        if failures:
            number = f"{len(failures)} of {counted(len(found), 'session')}"
            yield f"note: {number} of {name} failed and are left out. The first: {failures[0]}"


def comparison_lines(names: Sequence[str], compared: Mapping[str, PairedDifference]) -> Iterator[str]:
    """Yield the names of the policies, the table of their differences, and the verdict."""
    yield from (f"{letter}: {name}" for letter, name in zip("AB", names, strict=True))
    rows = [
        (
            *(name, str(one.num_prompts), f"{one.a:.3f}", f"{one.b:.3f}", f"{one.b - one.a:+.3f}"),
            f"{one.low:+.3f} to {one.high:+.3f}" if math.isfinite(one.low) else "-",
            *(f"{one.p:.4f}", f"{one.p_holm:.4f}"),
        )
        for name, one in compared.items()
    ]
    columns = ("set", "prompts", "A", "B", "B - A", "95 % interval", "p", "p (Holm)")
    yield from table_lines(columns, rows, right=columns[1:])
    gains = [one.b - one.a for one in compared.values() if one.p_holm < ALPHA]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    yield (
        f"B is better on {better} of {counted(len(rows), 'set')}, A on {worse} (p < {ALPHA} after Holm's correction; "
        "permutation test over prompts)"
    )
