"""MLflow tracker, with a database in the run's folder or a server; a resumed run continues its MLflow run."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import structlog

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, NotReadyError, SettingsError
from rl_core.files import write_durably
from rl_core.record_fields import converts_arguments
from rl_core.secret_settings import hide, redact_option
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.servers import COLUMNS, read_run_id, table_row
from rl_metrics.trackers.tracker import Ending

log = structlog.get_logger(__name__)

STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status of each ending."""

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # otherwise it reports usage; read at import
}
DEFAULT_ENVIRONMENT = {
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's default of seven takes minutes to report a missing server
}
RUN_ID_FILE = "mlflow_run_id"

MAX_METRICS, MAX_PARAMS = 1000, 100
"""MLflow's maximum number of each in one request."""

MAX_NAME, MAX_PARAM = 250, 6000
"""MLflow's maximum length of a name, and of a parameter's text."""

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
"""Logged quantiles of a distribution, because MLflow has no histograms."""

TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag that lists the tables MLflow shows."""

REFUSED = re.compile(r"[^/\w.\- ]|_(?=at[_@])")
"""Characters to escape: those that MLflow refuses, the colon of escapes, and text that would read as an @."""


class MlflowTracker:
    """Logs metrics, settings and tables to one run of MLflow, at the trainer's steps.

    The run's folder stores the id of MLflow's run, so that a resumed run continues it. MLflow keeps every value of a
    repeated step; the last one is the newest. Distributions are logged as three quantiles. `mlflow_name` converts
    names.
    """

    @converts_arguments
    def __init__(
        self,
        directory: Path,
        *,
        experiment: str,
        name: str | None = None,
        uri: str | None = None,
        config: Mapping[str, Json] | None = None,
        ending: Callable[[], Ending] = lambda: "finished",
    ) -> None:
        """Start or continue the run.

        Args:
            directory: The run's folder.
            experiment: Name of MLflow's experiment; created if missing.
            name: Name of the run in MLflow; None lets MLflow choose.
            uri: A tracking server, or a database such as "sqlite:///runs/mlflow.db"; None uses MLFLOW_TRACKING_URI, or
                without it the database `mlflow/mlflow.db` in the run's folder.
            config: The run's settings, logged as parameters, unless already set, and as `settings.json`.
            ending: Returns how the run ended; called by `close`.

        Raises:
            MissingExtraError: MLflow is not installed.
            SettingsError: MLflow cannot be reached, or refuses the run.
            DataError: The file with the run's id is broken.
        """
        self._mlflow = _import_mlflow()
        directory.mkdir(parents=True, exist_ok=True)
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or _database(directory / "mlflow")
        self._ending = ending
        self._tables: dict[str, str] = {}
        self._is_closed = False
        try:  # a client, because the fluent API has one address for the process, which children inherit
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            self._run_id = self._start(directory / RUN_ID_FILE, experiment, name)
            self._log_config(config or {})
        except (DataError, SettingsError):
            raise
        except Exception as error:  # from MLflow, SQLAlchemy, requests or the disk, without a common class
            raise self._refusal(error) from error
        log.info("mlflow_run", id=self._run_id, uri=redact_option("uri", self._uri))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step.

        Raises:
            NotReadyError: After `close`.
        """
        self._check_open()
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        rows = [metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for batch in _batches(rows, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log late metrics as `log` does, because every value has its own step."""
        self.log(step, metrics)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log three quantiles of each distribution, such as `distribution/reward/p50`.

        Raises:
            NotReadyError: After `close`.
        """
        quantiles = {
            f"{name}/{quantile}": histogram.quantile(share)
            for name, histogram in histograms.items()
            for quantile, share in QUANTILES.items()
            if histogram.count
        }
        self.log(step, quantiles)

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Log a table as the artifact `generations/{name}/{step}.json`; MLflow shows the newest as a table.

        Raises:
            NotReadyError: After `close`.
        """
        self._check_open()
        path = f"generations/{mlflow_name(name)}/{step:08d}.json"
        table = {"columns": list(COLUMNS), "data": [table_row(step, sample) for sample in samples]}
        self._client.log_dict(self._run_id, table, path)
        self._tables[name] = path
        tables = [{"path": newest, "type": "table"} for newest in self._tables.values()]
        self._client.set_tag(self._run_id, TABLES_TAG, json.dumps(tables))

    def close(self) -> None:
        """End the run with the status of `ending`. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._client.set_terminated(self._run_id, status=STATUS[self._ending()])

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReadyError("the MLflow run has ended; create a new MlflowTracker to continue it.")

    def _start(self, file: Path, experiment: str, name: str | None) -> str:
        """Continue the run in the file, or create one."""
        if file.exists():
            run_id = read_run_id(file, server="MLflow")
            self._client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._client.create_run(self._experiment_id(experiment), run_name=name).info.run_id
            write_durably(file, run_id.encode())
        return run_id

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, _artifacts(self._uri)))
            except self._mlflow.MlflowException:  # another run has just created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise SettingsError(
                f"MLflow's experiment {name!r} is deleted; restore it in MLflow, or choose another name."
            )
        return str(experiment.experiment_id)

    def _log_config(self, config: Mapping[str, Json]) -> None:
        if not config:
            return
        # Parameters cannot be changed, so a resumed run keeps the first value of a changed setting.
        logged = self._client.get_run(self._run_id).data.params
        texts = {name: text[:MAX_PARAM] for key, text in _flat(config) if (name := mlflow_name(key)) not in logged}
        for batch in _batches([self._mlflow.entities.Param(*pair) for pair in texts.items()], MAX_PARAMS):
            self._client.log_batch(self._run_id, params=batch)
        self._client.log_dict(self._run_id, dict(config), "settings.json")

    def _refusal(self, error: Exception) -> SettingsError:
        reason = hide(str(error).strip().split("\n")[0][:300], {"uri": self._uri})
        return SettingsError(
            f"MLflow must start at {redact_option('uri', self._uri)}; found {type(error).__name__}: {reason} Set "
            f"metrics.mlflow_uri or MLFLOW_TRACKING_URI to an existing server or database; to start a new run "
            f"there, remove {RUN_ID_FILE} from the run's folder."
        )


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts for a metric or a part of a path.

    `@` becomes `_at_`, as in verl. Other characters that MLflow refuses become their code between colons, such as
    `:7b:` for `{`; so do dots that would change the path, and `::` is an empty part. Names stay distinct. One of more
    than 250 characters is cut, and ends with a digest.
    """
    plain = REFUSED.sub(lambda match: "_at_" if match[0] == "@" else _escape(match[0]), name)
    is_up = re.compile(r"\.$|\.\.").match
    plain = "/".join(_escape(part[0]) + part[1:] if is_up(part) else part or "::" for part in plain.split("/"))
    if len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{plain[: MAX_NAME - 18]}--{digest}"


def _escape(character: str) -> str:
    return f":{ord(character):x}:"


def _import_mlflow() -> ModuleType:
    """Import MLflow, after setting the environment variables that it reads at import."""
    os.environ.update(ENVIRONMENT)
    for variable, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        import alembic
        import mlflow.entities
        import sqlalchemy  # noqa: F401 - the client without a server needs both, and reports it late
    except ImportError as error:
        raise MissingExtraError("this tracker needs MLflow. Install rl-metrics[mlflow] as the README says.") from error
    del alembic
    return mlflow


def _batches(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _database(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder.resolve()}/mlflow.db"


def _artifacts(uri: str) -> str | None:
    """Return the artifacts' folder of a local database, next to it; MLflow would use the current folder."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(unquote(uri.removeprefix("sqlite:///"))).resolve().parent / "mlartifacts").as_uri()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
