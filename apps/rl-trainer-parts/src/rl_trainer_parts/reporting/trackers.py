"""Build the console and the trackers that the settings select."""

from collections.abc import Callable
from pathlib import Path

from rl_core.secret_settings import resolve_secrets
from rl_metrics.trackers import (
    BackgroundTracker,
    ConsoleTracker,
    Ending,
    Fanout,
    JsonlTracker,
    MlflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from rl_trainer_parts.reporting.report_writer import ReportWriter
from rl_trainer_parts.settings.fields import plain_settings
from rl_trainer_parts.settings.schema import Settings


def make_console(settings: Settings) -> ConsoleTracker:
    """The console that `metrics.console` selects; by default a live display in a terminal, plain lines elsewhere."""
    return ConsoleTracker(
        kind=settings.metrics.console,
        hidden=settings.zero_metrics,
        generations_in="generations.jsonl and the report" if settings.metrics.report else "generations.jsonl",
    )


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
    metrics, name = settings.metrics, settings.run.name
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard"),
        "wandb": lambda: WandbTracker(
            folder, project=metrics.wandb_project, name=name, config=plain_settings(settings)
        ),
        "mlflow": lambda: MlflowTracker(
            folder,
            experiment=metrics.mlflow_experiment,
            name=name,
            uri=resolve_secrets(metrics.mlflow_uri, where="metrics.mlflow_uri"),
            config=plain_settings(settings),
            ending=ending,
        ),
    }
    trackers |= {chosen: BackgroundTracker(makers[chosen](), name=chosen) for chosen in metrics.trackers}
    return Fanout(trackers, kept=("jsonl",))
