"""Any text passes through trackers, records and the report without errors; no tracker is dropped."""

import io
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.report import write_report
from rl_metrics.run_files import EventLog, RolloutLog, RolloutRow, read_events
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.rollout_log import read_rollouts
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers import ConsoleTracker, Fanout, JsonlTracker, TensorBoardTracker
from rl_metrics.trackers.servers import table_row

NASTY = [
    "\ud800",
    "\udfff\ud800",
    "\x00",
    "\x1b]0;x\x07",
    "\u202e",
    "\ufffe\uffff",
    "\U0010ffff",
    "\r\n",
    "</script>",
    "",
]
TEXT = st.sampled_from(NASTY) | st.text(st.characters(), max_size=20)  # includes lone surrogates
LARGE = "\ud800\x1b<" * (1 << 17)


def write_all(folder, text):
    shown = io.StringIO()
    trackers = {
        "jsonl": JsonlTracker(folder / "metrics.jsonl"),
        "tensorboard": TensorBoardTracker(folder / "tensorboard"),
        "console": ConsoleTracker(console=Console(file=shown)),
    }
    fanout = Fanout(trackers)
    sample = GenerationSample(
        prompt_uid=text,
        input=text,
        output=text,
        ground_truth=text,
        policy_version=(0, 0),
        source=text,
        failure=text,
        components={text: 1.0},
    )
    fanout.log(1, {f"val-core/{text}/reward/mean@1": 1.0, "critic/rewards/mean": 0.5})
    fanout.log_late(1, {f"val-aux/{text}": 1.0})
    histogram = Histogram()
    histogram.add([1.0, 2.0])
    fanout.log_histograms(1, {f"response_length/{text}": histogram})
    fanout.log_generations(1, f"validation/{text}", [sample])
    assert fanout.active == tuple(trackers)
    fanout.close()
    assert all(line.isprintable() for line in shown.getvalue().split("\n"))
    "".join(map(str, table_row(1, sample))).encode()
    write_files(folder, text)
    write_report([open_run(folder)], folder / "report.html")
    assert (folder / "report.html").stat().st_size > 1000


def write_files(folder, text):
    events = EventLog(folder / "events.jsonl")
    events.write("run_failed", error=text, more={text: [text]})
    events.close()
    row = RolloutRow(
        step=1,
        time=0.0,
        prompt_uid=text,
        problem="p",
        source=text,
        prompt=text,
        response=text,
        ground_truth=text,
        components={text: 1.0},
        finish=text,
        failure=text,
        tokens=(text,),
        mask=(True,),
        columns={"token_ids": (1.0,)},
    )
    log = RolloutLog(folder / "rollouts.jsonl")
    log.write([row, replace(row, output=1)])
    log.close()
    assert [one["event"] for one in read_events(folder / "events.jsonl")] == ["run_failed"]
    assert len(list(read_rollouts(folder / "rollouts.jsonl"))) == 2


def test_any_text_passes_through_trackers_records_and_the_report(tmp_path):
    folders = (tmp_path / str(number) for number in count())

    @settings(max_examples=8, deadline=None)
    @given(TEXT)
    def passes(text):
        folder = next(folders)
        folder.mkdir()
        write_all(folder, text)

    passes()


@pytest.mark.parametrize("text", ["".join(NASTY), LARGE], ids=["nasty", "large"])
def test_nasty_and_large_texts_pass_too(tmp_path, text):
    write_all(tmp_path, text)
