"""What a run says: definitions, reductions, validation, trackers."""

from rl_metrics.definitions.definition import Band, Metric, MetricTable
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.async_training import summarize_processing_times, summarize_staleness
from rl_metrics.reductions.distributions import batch_distributions, timing_distributions
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.reductions.memory import memory_metrics
from rl_metrics.reductions.mismatch import summarize_mismatch
from rl_metrics.reductions.recorder import Recorder
from rl_metrics.reductions.rollouts import (
    summarize_batch,
    summarize_components,
    summarize_rewards,
    summarize_speed,
    summarize_timings,
)
from rl_metrics.run_files.events import EventLog, read_events
from rl_metrics.run_files.generations import GenerationSample, draw_generations
from rl_metrics.trackers.background import BackgroundTracker
from rl_metrics.trackers.console import ConsoleTracker, Reading
from rl_metrics.trackers.fanout import Fanout
from rl_metrics.trackers.jsonl import (
    GenerationTable,
    JsonlTracker,
    MetricRow,
    StepHistograms,
    read_generations,
    read_histograms,
    read_metrics,
)
from rl_metrics.trackers.protocol import Tracker
from rl_metrics.validation.summary import ValidationResponses, headline, summarize_validation

__all__ = [
    "DEFINITIONS",
    "BackgroundTracker",
    "Band",
    "ConsoleTracker",
    "EventLog",
    "Fanout",
    "GenerationSample",
    "GenerationTable",
    "Histogram",
    "JsonlTracker",
    "Metric",
    "MetricRow",
    "MetricTable",
    "Reading",
    "Recorder",
    "StepHistograms",
    "Tracker",
    "ValidationResponses",
    "batch_distributions",
    "draw_generations",
    "headline",
    "memory_metrics",
    "read_events",
    "read_generations",
    "read_histograms",
    "read_metrics",
    "summarize_batch",
    "summarize_components",
    "summarize_mismatch",
    "summarize_processing_times",
    "summarize_rewards",
    "summarize_speed",
    "summarize_staleness",
    "summarize_timings",
    "summarize_validation",
    "timing_distributions",
]
