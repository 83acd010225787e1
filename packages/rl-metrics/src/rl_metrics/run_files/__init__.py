"""Files in a run's folder: appended during the run, read afterwards."""

from rl_metrics.run_files.events import EventLog, read_events
from rl_metrics.run_files.generations import GenerationSample, draw_places
from rl_metrics.run_files.history import read_history
from rl_metrics.run_files.json_lines import JsonLinesWriter, read_json_lines
from rl_metrics.run_files.rollout_log import FLOAT_COLUMNS, RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import open_run

__all__ = [
    "FLOAT_COLUMNS",
    "EventLog",
    "GenerationSample",
    "JsonLinesWriter",
    "RolloutLog",
    "RolloutRow",
    "draw_places",
    "open_run",
    "read_events",
    "read_history",
    "read_json_lines",
]
