"""Samples of a policy's responses, drawn independently of the order in which processes report them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any

import msgspec
import numpy as np

from rl_core.data import Json
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import record
from rl_metrics.run_files.json_lines import number_or_none

MAX_SEED = 2**64 - 1


@record
class GenerationSample:
    """One response in readable form, for example of a validation.

    Attributes:
        prompt_uid: Identifier of the prompt.
        input: The prompt as text.
        output: The response as text, with the answers of tools.
        score: Its reward; NaN without one.
        ground_truth: Expected answer as the prompt gives it; None without one.
        policy_version: Oldest and newest version of its tokens; the engine's version, twice, without tokens.
        source: Process that reported it, such as "rollouter".
        failure: Why its session failed; None if it did not.
        components: Parts of the reward by name.
        data_source: Data source of the prompt.
        finish: Why the response ended: "stop", "length", "abort".
        images: Digests of the images in input and output, in order, as the folder `images` of the run has them.
    """

    prompt_uid: str
    input: str
    output: str
    score: float = math.nan
    ground_truth: Json = None
    policy_version: tuple[int, int]
    source: str
    failure: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    data_source: str = "default"
    finish: str = "stop"
    images: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the sample as JSON values, to send to another process; numbers that are not finite are null."""
        row: dict[str, Json] = {one.name: getattr(self, one.name) for one in fields(self)}
        row["score"] = number_or_none(self.score)
        row["policy_version"] = [int(version) for version in self.policy_version]
        row["components"] = {name: number_or_none(value) for name, value in self.components.items()}
        row["images"] = list(self.images)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "GenerationSample":
        """Create a sample from `to_json`; other keys are ignored, and null numbers become NaN.

        Raises:
            DataError: A field is missing or of another type.
        """
        try:
            numbers = {name: math.nan if value is None else value for name, value in row["components"].items()}
            score = math.nan if row["score"] is None else row["score"]
            return msgspec.convert({**row, "score": score, "components": numbers}, cls)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"a generation sample must have the fields of GenerationSample; {error}.") from None


def draw_generations(
    samples: Sequence[GenerationSample], *, count: int, seed: int, batches: Sequence[int] | None = None
) -> list[GenerationSample]:
    """Draw samples to show, independently of the order of samples and the number of processes.

    Validations of the same prompts with equally many responses show the same prompts each time.

    Args:
        samples: All samples of a validation, of every batch and process.
        count: Number of samples to draw; 0 or less draws none, and at most all are drawn.
        seed: Seed from 0 to 2**64 - 1.
        batches: Batch of each sample; every batch has at least one sample in the draw if `count` suffices.

    Returns:
        The drawn samples, sorted by input, output, prompt, and then everything else.

    Raises:
        SettingsError: The seed is out of range.
    """
    numbered = zip(samples, [0] * len(samples) if batches is None else batches, strict=True)
    in_order = sorted(numbered, key=lambda pair: _sort_key(pair[0]))
    places = draw_places([batch for _, batch in in_order], count=count, seed=seed)
    return [in_order[place][0] for place in places]


def draw_places(batches: Sequence[int], *, count: int, seed: int) -> list[int]:
    """Draw indices of items in a fixed order, such as problems by name.

    Args:
        batches: Batch of each item; every batch has at least one item in the draw if `count` suffices.
        count: Number of items to draw; 0 or less draws none, and at most all are drawn.
        seed: Seed from 0 to 2**64 - 1.

    Returns:
        Increasing indices.

    Raises:
        SettingsError: The seed is out of range.
    """
    if not 0 <= seed <= MAX_SEED:
        raise SettingsError(f"the seed of a draw must be from 0 to 2**64 - 1; found {seed}.")
    if count <= 0:
        return []
    # Sorting raw Philox words, unlike Generator.choice, is the same in every numpy version. The key is not a
    # list, because numpy would convert one with a large seed to float64.
    words = np.random.Philox(key=seed).random_raw(len(batches))
    drawn = [int(place) for place in np.argsort(words, kind="stable")]
    first: dict[int, int] = {}  # the first drawn item of each batch
    for place in drawn:
        first.setdefault(batches[place], place)
    return sorted(list(dict.fromkeys([*first.values(), *drawn]))[:count])


def _sort_key(sample: GenerationSample) -> tuple[str, str, str, str]:
    # The process comes last, because where a session ran is random. JSON text can be ordered; NaN and None cannot.
    row = sample.to_json()
    rest = [row[name] for name in ("score", "ground_truth", "failure", "components", "policy_version", "source")]
    return sample.input, sample.output, sample.prompt_uid, json.dumps(rest, sort_keys=True)
