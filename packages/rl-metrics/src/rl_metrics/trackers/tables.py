"""Generations as rows of a table, for wandb and MLflow."""

import json

from rl_core.data import Json, encodable_json
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import json_text

COLUMNS = (
    "step",
    "prompt_uid",
    "input",
    "output",
    "score",
    "ground_truth",
    "oldest_version",
    "newest_version",
    "source",
    "failure",
    "components",
)


def table_row(step: int, sample: GenerationSample) -> list[Json]:
    """Return the cells of a sample; numbers that are not finite are None, because browsers cannot parse NaN."""
    oldest, newest = sample.policy_version
    plain = sample.to_json()
    row: list[Json] = encodable_json(
        [
            step,
            sample.prompt_uid,
            sample.input,
            sample.output,
            plain["score"],
            json_text(sample.ground_truth),
            oldest,
            newest,
            sample.source,
            sample.failure,
            json.dumps(plain["components"], ensure_ascii=False),
        ]
    )
    return row
