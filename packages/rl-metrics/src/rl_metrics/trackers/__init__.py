"""Destinations of metrics, one module per tracker."""

from rl_metrics.trackers.console import ConsoleKind, ConsoleTracker
from rl_metrics.trackers.jsonl import JsonlTracker, read_generations, read_histograms
from rl_metrics.trackers.mlflow import MlflowTracker
from rl_metrics.trackers.tensorboard import TensorBoardTracker
from rl_metrics.trackers.tracker import BackgroundTracker, Ending, Fanout, Tracker
from rl_metrics.trackers.wandb import WandbTracker

__all__ = [
    "BackgroundTracker",
    "ConsoleKind",
    "ConsoleTracker",
    "Ending",
    "Fanout",
    "JsonlTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "read_generations",
    "read_histograms",
]
