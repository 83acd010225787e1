"""Weights & Biases tracker, online or offline; a resumed run continues its wandb run."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import structlog

from rl_core.data import Json
from rl_core.errors import MissingExtraError, NotReadyError, SettingsError
from rl_core.files import write_durably
from rl_core.record_fields import converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.servers import COLUMNS, read_run_id, table_row

if TYPE_CHECKING:
    from wandb import Run

log = structlog.get_logger(__name__)

Mode = Literal["online", "offline", "disabled"]
"""Destination of rows: the server, files only, or none."""

STEP = "training/global_step"
"""The step axis. wandb's own step counts rows, and drops rows of repeated steps, as after a resume."""

RUN_ID_FILE = "wandb_run_id"
BUCKETS = 64
LOGIN_TIMEOUT_S = 60.0
INIT_TIMEOUT_S = 90.0


class WandbTracker:
    """Logs rows and tables to one run of wandb, at the trainer's steps.

    The run's folder stores the id of the wandb run, so that a resumed run continues it. Offline, each launch writes its
    own folder under `wandb/` with this id; nothing reaches the network, and `wandb sync` uploads them later. About the
    newest 32 KiB of a launch are only in memory, and lost if the process is killed.
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
        """Start or continue the run.

        Args:
            directory: The run's folder; wandb writes to `wandb/` in it.
            project: Project in wandb; entity, key and server come from wandb's own configuration.
            name: Name of the run in wandb; None lets wandb choose.
            mode: Destination; None uses WANDB_MODE, or "online" without it.
            config: The run's settings, shown with it.

        Raises:
            MissingExtraError: wandb is not installed.
            SettingsError: The mode is invalid, or wandb cannot start, for example without a key or server.
            DataError: The file with the run's id is broken.
        """
        chosen = mode or os.environ.get("WANDB_MODE") or "online"
        if chosen not in get_args(Mode):
            raise SettingsError(f"wandb's mode must be one of {', '.join(get_args(Mode))}; found {chosen!r}.")
        if chosen != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # otherwise it reports its own errors; read at import
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "this tracker needs wandb. Install rl-metrics[wandb] as the README says."
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        id_file = directory / RUN_ID_FILE
        if not id_file.exists():
            write_durably(id_file, secrets.token_hex(8).encode())
        run_id = read_run_id(id_file, server="wandb")
        try:
            run = wandb.init(
                dir=str(directory),
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                mode=cast("Mode", chosen),
                config=None if config is None else dict(config),
                settings=wandb.Settings(
                    console="off",  # the console tracker uses the terminal
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
        """Log late metrics as `log` does, because every value has its own step."""
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
        """Finish the run, after uploading everything if online. Idempotent."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _append(self, row: dict[str, Any]) -> None:
        if self._run is None:
            raise NotReadyError("the wandb run is finished; create a new WandbTracker to continue it.")
        self._run.log(row)  # never with wandb's own step
