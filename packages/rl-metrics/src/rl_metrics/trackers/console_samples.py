"""Selection and format of validation samples in the console."""

import math
from collections.abc import Sequence

from rich.text import Text

from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import json_text
from rl_metrics.trackers.text import plain_text
from rl_metrics.validation.summary import MAIN_VARIABLES

MAX_WRONG, MAX_RIGHT = 3, 1
"""Maximum number of samples shown, one line each, so that the run's own lines stay visible."""

MAX_TEXT, MAX_FAILURE = 60, 120
"""Maximum number of shown characters of a text and of a failure's reason."""

STYLES = {"failed": "bold red", "wrong": "red", "right": "green"}


def sample_lines(title: str, samples: Sequence[GenerationSample], *, place: str | None) -> list[Text]:
    """Return a heading, the worst samples that are not right, and one that is.

    Args:
        title: Title of the samples, such as "validation at step 0".
        samples: Samples of one validation.
        place: File with all samples; None shows no file.
    """
    ranked = sorted(samples, key=_goodness)
    right = [sample for sample in ranked if _verdict(sample) == "right"]
    others = [sample for sample in ranked if _verdict(sample) != "right"]
    is_judged = all(_verdict(sample) in STYLES for sample in samples)
    heading = f"{title}: {len(samples)} samples" + (f", {len(others)} wrong" if is_judged else ", worst first")
    if (len(others) > MAX_WRONG or len(right) > MAX_RIGHT) and place is not None:
        heading += f"; all are in {place}"
    return [Text(heading), *(_line(sample) for sample in (*others[:MAX_WRONG], *right[:MAX_RIGHT]))]


def _line(sample: GenerationSample) -> Text:
    verdict = _verdict(sample)
    given, output = (plain_text(text, limit=MAX_TEXT) for text in (sample.input, sample.output))
    text = f" {given} -> {output}"
    if (truth := json_text(sample.ground_truth)) is not None:
        text += f"  expected {plain_text(truth, limit=MAX_TEXT)}"
    if sample.failure is not None:
        text += f"  {plain_text(sample.failure, limit=MAX_FAILURE)}"
    return Text.assemble("  ", (f"{verdict}:", STYLES.get(verdict, "yellow")), text)


def _verdict(sample: GenerationSample) -> str:
    """Return right or wrong if that is clear, else the score, whose scale is unknown here."""
    value = _main_value(sample)
    if sample.failure is not None:
        return "failed"
    if value <= 0:
        return "wrong"
    return "right" if value == 1 else f"score {value:.3g}"


def _main_value(sample: GenerationSample) -> float:
    values = {"reward": sample.score, **sample.components}
    return next(values[name] for name in MAIN_VARIABLES if name in values)


def _goodness(sample: GenerationSample) -> tuple[bool, float]:
    """Return a sort key: failed sessions first, then by score."""
    value = _main_value(sample)
    return sample.failure is None, -math.inf if math.isnan(value) else value
