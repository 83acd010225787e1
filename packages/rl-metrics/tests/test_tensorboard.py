import re
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as PlainReader
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.util.tensor_util import make_ndarray
from tracker_files import table_cells, tensorboard_events, tensorboard_series

from rl_core.errors import MissingExtraError, NotReadyError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.tensorboard import TensorBoardTracker

EVIL = "<script>x</script> | **bold** `code` [a](b) ![i](j) _u_ &amp; \\| # 1. ~~~\nline\x1b[2J http://a.b <br>"


def sample(**changed):
    given = {"prompt_uid": "p1", "input": "1+1", "output": "2", "policy_version": (3, 3), "source": "rollouter"}
    return GenerationSample(**(given | changed))


def test_scalars_stand_at_the_trainers_steps(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tensorboard")
    tracker.log(0, {"val-core/a/acc/mean@1": 0.25})
    tracker.log(7, {"actor/entropy": 0.5, "actor/loss": float("nan")})
    tracker.log(9, {"actor/entropy": 0.125, "actor/loss": 1e300})
    entropy = tensorboard_series(tmp_path / "tensorboard", "actor/entropy")
    assert entropy == [(7, 0.5), (9, 0.125)]  # readable before the tracker is closed
    assert tensorboard_series(tmp_path / "tensorboard", "val-core/a/acc/mean@1") == [(0, 0.25)]
    assert str(tensorboard_series(tmp_path / "tensorboard", "actor/loss")) == "[(7, nan), (9, inf)]"
    tracker.close()
    tracker.close()
    events = tensorboard_events(tmp_path / "tensorboard")
    assert events.SummaryMetadata("actor/entropy").plugin_data.plugin_name == "scalars"


def test_generations_are_a_table_at_their_step(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    samples = [
        sample(score=0.5, ground_truth=2),
        sample(prompt_uid="p2", policy_version=(2, 4), source="learner", failure="timeout"),
    ]
    tracker.log_generations(40, "val/generations", samples)
    tracker.close()
    ((step, content),) = tensorboard_series(tmp_path, "val/generations")
    assert step == 40
    assert table_cells(markdown_to_safe_html(content)) == [
        ["score", "input", "output", "ground truth", "failure", "policy version", "source", "prompt"],
        ["0.5", "1+1", "2", "2", "", "3", "rollouter", "p1"],
        ["nan", "1+1", "2", "", "timeout", "2 to 4", "learner", "p2"],
    ]
    assert tensorboard_events(tmp_path).SummaryMetadata("val/generations").plugin_data.plugin_name == "text"


def histogram(*values):
    one = Histogram()
    one.add(values)
    return one


def test_histograms_are_read_back_by_tensorboards_readers(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_histograms(
        3, {"distribution/reward": histogram(0.0, 0.0, 1.0, 0.5), "distribution/advantage": histogram()}
    )
    tracker.log(3, {"a": 1.0})
    tracker.log_histograms(4, {"distribution/reward": histogram(-1e300, 1e300)})
    tracker.close()
    plain = PlainReader(str(tmp_path), size_guidance={"histograms": 0})  # the reader for scripts
    plain.Reload()
    assert plain.Tags()["histograms"] == ["distribution/reward"]
    first, second = plain.Histograms("distribution/reward")
    assert (first.step, second.step) == (3, 4)
    value = first.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (0.0, 1.0, 4, 1.5)
    assert sum(value.bucket) == 4
    assert (value.bucket[0], value.bucket_limit[-1]) == (2, 1.0)
    events = tensorboard_events(tmp_path)  # the reader of TensorBoard's pages
    assert events.SummaryMetadata("distribution/reward").plugin_data.plugin_name == "histograms"
    buckets = make_ndarray(events.Tensors("distribution/reward")[0].tensor_proto)
    assert (buckets[0, 0], buckets[-1, 1]) == (0.0, 1.0)
    assert [count for _, _, count in buckets if count] == [2.0, 1.0, 1.0]
    held = [left <= 0.5 <= right for left, right, count in buckets if count == 1.0]
    assert held == [True, False]


def test_histograms_of_a_repeated_step_are_replaced(tmp_path):
    for attempt in (1, 2):
        tracker = TensorBoardTracker(tmp_path)
        for step in range(3 - attempt, 4):
            tracker.log_histograms(step, {"distribution/reward": histogram(float(attempt))})
            tracker.log(step, {"a": 1.0})
        tracker.close()
    plain = PlainReader(str(tmp_path), size_guidance={"histograms": 0})
    plain.Reload()
    rows = plain.Histograms("distribution/reward")
    assert [(row.step, row.histogram_value.max) for row in rows] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_no_text_is_taken_for_markdown_or_html(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_generations(1, "val", [sample(input=EVIL, output=EVIL * 500)])
    tracker.close()
    ((_, content),) = tensorboard_series(tmp_path, "val")
    page = markdown_to_safe_html(content)
    head, row = table_cells(page)
    assert len(row) == len(head) == 8
    assert row[1] == EVIL.replace("\n", r"\n").replace("\x1b", r"\x1b")
    assert len(row[2]) == 4000
    assert not re.search("<(script|a|img|em|strong|code|br|h1|pre)", page)


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"a": float(step)})
        first.log_generations(step, "val", [sample(output=f"old {step}")])
    first.close()
    resumed = TensorBoardTracker(tmp_path)
    resumed.log(3, {"a": 30.0})
    resumed.log_generations(3, "val", [sample(output="new")])
    resumed.close()
    assert tensorboard_series(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    plain = PlainReader(str(tmp_path))  # the reader for scripts
    plain.Reload()
    assert [(event.step, event.value) for event in plain.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [step for step, _ in tensorboard_series(tmp_path, "val")] == [1, 2, 3]
    assert b"new" in tensorboard_series(tmp_path, "val")[-1][1]


@pytest.mark.parametrize("clock", [[5_000.0, 1_400.0, 1_500.0], [5_000.0] * 12], ids=["went back", "stands still"])
def test_a_resumed_run_is_shown_last_whatever_the_clock_says(tmp_path, monkeypatch, clock):
    for step, now in enumerate(clock):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        tracker = TensorBoardTracker(tmp_path)
        tracker.log(step, {"a": float(step)})
        tracker.log(step + 1, {"a": -1.0})  # the next run replaces it
        tracker.close()
    assert tensorboard_series(tmp_path, "a") == [(step, float(step)) for step in range(len(clock))] + [(len(clock), -1)]


def test_what_comes_late_of_a_step_that_was_done_drops_none_of_it(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"a": float(step)})
    first.close()
    resumed = TensorBoardTracker(tmp_path)
    resumed.log_late(3, {"late": 0.5})
    resumed.log_generations(3, "val", [sample()])
    resumed.log(4, {"a": 40.0})
    resumed.log_late(2, {"late": 0.25})
    resumed.close()
    assert tensorboard_series(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert tensorboard_series(tmp_path, "late") == [(3, 0.5), (2, 0.25)]
    assert [step for step, _ in tensorboard_series(tmp_path, "val")] == [3]


def test_generations_may_come_before_the_metrics_of_their_step(tmp_path):
    for attempt in (1, 2):
        tracker = TensorBoardTracker(tmp_path)
        for step in range(3 - attempt, 3):  # step 2, then steps 1 and 2
            tracker.log_generations(step, "val", [sample(output=f"of attempt {attempt}")])
            tracker.log(step, {"a": float(attempt)})
        tracker.close()
    assert tensorboard_series(tmp_path, "a") == [(1, 2.0), (2, 2.0)]
    assert [step for step, _ in tensorboard_series(tmp_path, "val")] == [1, 2]
    assert all(b"of attempt 2" in text for _, text in tensorboard_series(tmp_path, "val"))


def test_after_close_it_says_so(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.close()
    with pytest.raises(NotReadyError, match="is closed"):
        tracker.log(1, {})


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-metrics\[tensorboard\]"):
        TensorBoardTracker(tmp_path)


def test_neither_torch_nor_tensorflow_is_loaded(tmp_path):
    code = (
        "import sys; from pathlib import Path; from rl_metrics.trackers.tensorboard import TensorBoardTracker\n"
        "assert 'tensorboard' not in sys.modules\n"
        "tracker = TensorBoardTracker(Path(sys.argv[1])); tracker.log(1, {'a': 1.0}); tracker.close()\n"
        "sys.exit(','.join(m for m in ('torch', 'tensorflow') if m in sys.modules) or 0)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
