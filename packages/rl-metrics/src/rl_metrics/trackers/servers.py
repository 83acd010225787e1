"""What the trackers of wandb and MLflow share: rows of a table of generations, and the file with the id of a run."""

import json
import re
from pathlib import Path

from rl_core.data import Json, encodable_json
from rl_core.errors import DataError
from rl_core.files import read_plain
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import json_text

RUN_ID = re.compile(r"[a-zA-Z0-9][\w\-]{0,255}", re.ASCII)

COLUMNS = (
    *("step", "prompt_uid", "input", "output", "score", "ground_truth", "oldest_version", "newest_version"),
    *("source", "failure", "components"),
)


def table_row(step: int, sample: GenerationSample) -> list[Json]:
    """Return the cells of a sample; numbers that are not finite are None, because browsers cannot parse NaN."""
    oldest, newest = sample.policy_version
    cells = sample.to_json() | {"step": step, "oldest_version": oldest, "newest_version": newest}
    cells["ground_truth"] = json_text(sample.ground_truth)
    cells["components"] = json.dumps(cells["components"], ensure_ascii=False)
    row: list[Json] = encodable_json([cells[name] for name in COLUMNS])
    return row


def read_run_id(file: Path, *, server: str) -> str:
    """Return the id of the server's run in a file of the run's folder.

    Raises:
        DataError: The file contains no id.
    """
    run_id = read_plain(file, max_bytes=4096).decode("utf-8", errors="replace").strip()
    if not RUN_ID.fullmatch(run_id):
        raise DataError(
            f"{file} must contain the id of {server}'s run in letters, digits, _ and -; found {run_id[:80]!r}. Write "
            "the id into it, or remove it to start a new run."
        )
    return run_id
