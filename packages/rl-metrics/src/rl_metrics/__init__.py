"""Record, inspect, compare and diagnose training runs."""

from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.reductions.recorder import Recorder
from rl_metrics.run_files.events import EventLog
from rl_metrics.run_files.generations import GenerationSample, draw_generations
from rl_metrics.trackers.console import ConsoleTracker
from rl_metrics.trackers.jsonl import JsonlTracker, read_metrics
from rl_metrics.trackers.tracker import BackgroundTracker, Fanout, Tracker
from rl_metrics.validation.responses import ValidationResponses
from rl_metrics.validation.summary import summarize_validation

__all__ = [
    "DEFINITIONS",
    "BackgroundTracker",
    "ConsoleTracker",
    "EventLog",
    "Fanout",
    "GenerationSample",
    "Histogram",
    "JsonlTracker",
    "Metric",
    "Recorder",
    "Tracker",
    "ValidationResponses",
    "draw_generations",
    "read_metrics",
    "summarize_validation",
]
