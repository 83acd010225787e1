"""Weights & Biases: the same run again after a resume, online or offline."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import structlog

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, NotReadyError, SettingsError
from rl_core.files import read_plain, write_durably
from rl_core.record_fields import converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.tables import COLUMNS, table_row

if TYPE_CHECKING:
    from wandb import Run

log = structlog.get_logger(__name__)

Mode = Literal["online", "offline", "disabled"]
"""Destination of rows: the server, files only, or none."""

STEP = "training/global_step"
"""The step axis. wandb's own counts rows, and a row that repeats a step of it, as after a resume, would be dropped."""

RUN_ID_FILE = "wandb_run_id"
RUN_ID = re.compile(r"[a-z0-9]{1,64}")
BUCKETS = 64
LOGIN_TIMEOUT_S = 60.0
INIT_TIMEOUT_S = 90.0


class WandbTracker:
    """Logs rows and tables to one run of wandb, at the trainer's steps.

    The run's id is in the run's folder, so that a resumed run continues it. Offline, each launch is a folder of
    its own under `wandb/`, all with this id; nothing reaches the network, and `wandb sync` sends them later. The newest
    32 KiB or so of a launch are in memory alone, and a process that is killed at once loses them.
    """

    @converts_arguments
    def __init__(
        self,
        directory: Path,
        *,
        project: str,
        name: str | None = None,
        mode: Mode | None = None,
        config: Mapping[str, Json] | None = None,
    ) -> None:
        """Start the run, or continue it.

        Args:
            directory: The run's folder; wandb writes below `wandb/` in it.
            project: Of wandb; its entity, key and server are as wandb finds them.
            name: What wandb shows; None lets wandb choose.
            mode: None takes WANDB_MODE, and "online" without it.
            config: The run's settings, to be shown beside it.

        Raises:
            MissingExtraError: wandb is not installed.
            SettingsError: The mode is another, or wandb cannot start: no key, no server.
            DataError: The file with the run's id is broken.
        """
        chosen = _checked_mode(mode)
        if chosen != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else its own faults are sent; it is read at the import
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "this tracker needs wandb. Install rl-metrics[wandb] as the README says."
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        run_id = _run_id(directory / RUN_ID_FILE)
        try:
            run = wandb.init(
                dir=str(directory),
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                mode=chosen,
                config=None if config is None else dict(config),
                settings=wandb.Settings(
                    console="off",  # the terminal is the console tracker's
                    silent=True,
                    login_timeout=LOGIN_TIMEOUT_S,
                    init_timeout=INIT_TIMEOUT_S,
                ),
            )
        except wandb.errors.Error as error:
            reason = str(error).rstrip(".")
            raise SettingsError(
                f"wandb must start in mode {chosen!r}; found: {reason}. Run `wandb login`, or choose mode offline "
                "(WANDB_MODE=offline) and `wandb sync` later."
            ) from error
        if run.disabled and chosen != "disabled":
            run.finish()
            raise SettingsError(
                f"wandb must start in mode {chosen!r}; found no login within {LOGIN_TIMEOUT_S:g} s. Run `wandb login`, "
                "or choose mode offline."
            )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        self._table = wandb.Table
        self._histogram = wandb.Histogram
        self._run: Run | None = run
        log.info("wandb_run", id=run_id, mode=chosen, url=run.url if chosen == "online" else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row.

        Raises:
            NotReadyError: After `close`.
        """
        self._append({**{name: float(value) for name, value in metrics.items()}, STEP: step})

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """The same as `log`: every value has a step of its own."""
        self.log(step, metrics)

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Log a table under the name.

        Raises:
            NotReadyError: After `close`.
        """
        rows = [table_row(step, sample) for sample in samples]
        self._append({name: self._table(columns=list(COLUMNS), data=rows), STEP: step})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log each distribution under its name.

        Raises:
            NotReadyError: After `close`.
        """
        row: dict[str, Any] = {}
        for name, histogram in histograms.items():
            edges, counts = histogram.bins(BUCKETS)
            if len(counts):
                row[name] = self._histogram(np_histogram=(counts, edges))
        self._append({**row, STEP: step})

    def close(self) -> None:
        """Finish the run: online, when everything is sent. Can be called twice."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _append(self, row: dict[str, Any]) -> None:
        if self._run is None:
            raise NotReadyError("the run of wandb is finished; make a new WandbTracker to continue it.")
        self._run.log(row)  # never with a step of wandb's own


def _checked_mode(mode: str | None) -> Mode:
    chosen = mode or os.environ.get("WANDB_MODE") or "online"
    if chosen not in get_args(Mode):
        raise SettingsError(f"wandb's mode must be one of {', '.join(get_args(Mode))}; found {chosen!r}.")
    return cast("Mode", chosen)


def _run_id(file: Path) -> str:
    """The id in the file; a new one is there before wandb knows of it."""
    if not file.exists():
        write_durably(file, secrets.token_hex(8).encode())
    found = read_plain(file, max_bytes=4096).decode("utf-8", errors="replace").strip()
    if not RUN_ID.fullmatch(found):
        raise DataError(
            f"{file} must hold the id of wandb's run, small letters and digits; found {found[:80]!r}. Write the id "
            "into it, or remove it to begin a new run."
        )
    return found
