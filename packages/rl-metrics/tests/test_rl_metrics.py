import subprocess
import sys

import rl_metrics

HEAVY = (
    "ray",
    "vllm",
    "megatron",
    "transformers",
    "wandb",
    "torch",
    "pandas",
    "matplotlib",
    "tensorboard",
    "mlflow",
    "sqlalchemy",
)


def test_the_public_names():
    assert rl_metrics.__all__ == [
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
    for name in rl_metrics.__all__:
        assert getattr(rl_metrics, name) is not None


def test_the_import_is_light():
    code = f"import sys, rl_metrics; sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_module_runs_as_a_command():
    result = subprocess.run(
        [sys.executable, "-m", "rl_metrics", "list", "entropy"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert "actor/entropy" in result.stdout
