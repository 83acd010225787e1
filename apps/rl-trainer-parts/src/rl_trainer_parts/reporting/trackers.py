"""Build the trackers that the settings select."""

from collections.abc import Callable
from pathlib import Path

from rl_core.secret_settings import resolve_secrets
from rl_metrics.trackers import BackgroundTracker, ConsoleTracker, Ending, Fanout, JsonlTracker, Tracker
from rl_trainer_parts.reporting.report_writer import ReportWriter
from rl_trainer_parts.settings.fields import plain_settings
from rl_trainer_parts.settings.schema import Settings


def make_trackers(
    settings: Settings, folder: Path, console: ConsoleTracker, *, ending: Callable[[], Ending] = lambda: "finished"
) -> Fanout:
    """metrics.jsonl, the console, and the trackers in `metrics.trackers`.

    Args:
        settings: The run's settings.
        folder: The run's folder.
        console: Shows progress.
        ending: Returns how the run ended, when the trackers are closed.

    Raises:
        MissingExtraError: A tracker's library is not installed.
        SettingsError: A tracker cannot start.
    """
    trackers: dict[str, Tracker] = {}
    if settings.metrics.report:
        trackers["report"] = ReportWriter(folder, every=settings.metrics.report_every)  # the first is closed last
    trackers |= {"jsonl": JsonlTracker(folder / "metrics.jsonl"), "console": console}
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _tensorboard(folder),
        "wandb": lambda: _wandb(settings, folder),
        "mlflow": lambda: _mlflow(settings, folder, ending),
    }
    for name in settings.metrics.trackers:
        trackers[name] = BackgroundTracker(makers[name](), name=name)
    return Fanout(trackers, kept=("jsonl",))


def _tensorboard(folder: Path) -> Tracker:
    from rl_metrics.trackers import TensorBoardTracker

    return TensorBoardTracker(folder / "tensorboard")


def _wandb(settings: Settings, folder: Path) -> Tracker:
    from rl_metrics.trackers import WandbTracker

    return WandbTracker(
        folder, project=settings.metrics.wandb_project, name=settings.run.name, config=plain_settings(settings)
    )


def _mlflow(settings: Settings, folder: Path, ending: Callable[[], Ending]) -> Tracker:
    from rl_metrics.trackers import MlflowTracker

    return MlflowTracker(
        folder,
        experiment=settings.metrics.mlflow_experiment,
        name=settings.run.name,
        uri=resolve_secrets(settings.metrics.mlflow_uri, where="metrics.mlflow_uri"),
        config=plain_settings(settings),
        ending=ending,
    )
