import io
import math
import os
import re

import pytest
import structlog
from rich.console import Console

from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.console import ConsoleTracker, RunConsole, duration_text

STEP = {
    "critic/rewards/mean": 0.75,
    "actor/ppo_kl": 0.00123,
    "actor/entropy": 0.2345,
    "perf/throughput": 8123.4,
}
VALIDATION = {"val-core/arithmetic/acc/mean@1": 0.968}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal:
    """A console that writes to a buffer, with a clock set by the test."""

    def __init__(self, *, is_terminal, width=80):
        self.file = io.StringIO()
        self.clock = Clock()
        target = Console(file=self.file, force_terminal=is_terminal, width=width, color_system=None, _environ={})
        self.tracker = ConsoleTracker(console=target, generations_in="generations.jsonl", clock=self.clock)

    @property
    def text(self):
        return self.file.getvalue()

    @property
    def lines(self):
        return self.text.splitlines()

    def run_steps(self, steps, *, seconds=1.0, metrics=STEP):
        for step in steps:
            self.clock.now += seconds
            self.tracker.log(step, metrics)


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """Let only the test draw, and not a background thread."""
    monkeypatch.setattr(ConsoleTracker, "_tick_until_closed", lambda _: None)


@pytest.fixture
def plain():
    return Terminal(is_terminal=False)


@pytest.fixture
def live():
    terminal = Terminal(is_terminal=True)
    yield terminal
    terminal.tracker.close()


def test_a_phase_is_announced_at_once_and_timed(plain):
    with plain.tracker.phase("starting vLLM"):
        assert plain.lines == ["starting vLLM ..."]
        plain.clock.now += 7.75
    assert plain.lines == ["starting vLLM ...", "starting vLLM: 7.8 s"]


def test_what_runs_is_told_to_who_asks(plain):
    assert plain.tracker.running() == []
    with plain.tracker.phase("a", detail=lambda: "3 left"), plain.tracker.phase("a"):
        plain.clock.now += 2.0
        assert plain.tracker.running() == ["a ... 2 s, 3 left", "a ... 2 s"]
    assert plain.tracker.running() == []


def test_a_phase_that_fails_says_so(plain):
    def start():
        with plain.tracker.phase("starting vLLM"):
            plain.clock.now += 2.0
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        start()
    assert plain.lines[-1] == "starting vLLM: interrupted after 2.0 s"


def test_a_step_is_shown_as_a_line(plain):
    plain.tracker.begin("GRPO", total_steps=3)
    more = {
        "actor/loss": -0.00125,
        "actor/grad_norm": 0.5,
        "critic/advantages/mean": 0.0312,
        "perf/time_per_step": 3.25,
    }
    plain.run_steps([1], metrics=STEP | VALIDATION | more)
    assert plain.lines == [
        "GRPO: 3 steps",
        "GRPO 1/3  reward 0.750  kl 0.0012  entropy 0.234  speed 8,123 tok/s  validation 0.968  step time 3.25 s  "
        "grad norm 0.5  loss -0.00125  advantages 0.031  eta 2 s",
    ]


def test_a_replayed_step_says_so(plain, live):
    for terminal in (plain, live):
        terminal.tracker.begin("GRPO", total_steps=2)
        terminal.run_steps([1], metrics=STEP | {"rollout/replayed": 1.0})
        assert re.search(r"replayed.*100%", terminal.text, flags=re.DOTALL)


def test_every_step_has_a_line_however_short_it_is(plain):
    plain.tracker.begin("GRPO", total_steps=30)
    plain.run_steps(range(1, 31), seconds=0.01)
    plain.tracker.close()
    assert [line.split()[1] for line in plain.lines[1:]] == [f"{step}/30" for step in range(1, 31)]


def test_the_next_bar_begins_afresh(plain):
    plain.tracker.begin("warm start", total_steps=5)
    plain.run_steps([1, 2], metrics={"sft/loss": 1.25})
    plain.tracker.begin("GRPO", total_steps=20, done_steps=10)
    plain.run_steps([11])
    assert [line.split("  ")[0] for line in plain.lines] == [
        "warm start: 5 steps",
        "warm start 1/5",
        "warm start 2/5",
        "GRPO: 20 steps, 10 done before",
        "GRPO 11/20",
    ]
    assert "loss 1.2500" in plain.lines[1]


def test_the_time_left_counts_from_where_a_resumed_run_began(plain):
    plain.tracker.begin("GRPO", total_steps=20, done_steps=10)
    plain.run_steps([11], seconds=6.0)
    assert plain.lines[-1].endswith("eta 54 s")


def test_the_newest_validation_stays(plain):
    plain.tracker.begin("GRPO", total_steps=4)
    plain.run_steps([0], metrics=VALIDATION)
    plain.run_steps([1, 2, 3, 4])
    assert plain.lines[-1].endswith("validation 0.968")
    assert plain.lines[1] == "GRPO 0/4  validation 0.968"


def test_a_late_validation_is_shown_and_stays_and_other_late_metrics_are_not(plain):
    plain.tracker.begin("GRPO", total_steps=4)
    plain.run_steps([1, 2])
    plain.tracker.log_late(1, VALIDATION)
    plain.tracker.log_late(1, {"actor/entropy": 0.5})
    plain.run_steps([3, 4])
    assert [line.split("  ")[0] for line in plain.lines[3:]] == ["validation of step 1: 0.968", "GRPO 3/4", "GRPO 4/4"]
    assert plain.lines[-1].endswith("validation 0.968")


def test_plain_text_has_no_control_codes_and_no_wrapping(plain):
    plain.tracker.say("x" * 300 + " [bold]not markup[/bold] :smile:")
    assert plain.lines == ["x" * 300 + " [bold]not markup[/bold] :smile:"]
    assert "\x1b" not in plain.text


def test_the_summary_in_plain_lines(plain):
    rows = {"steps": 20, "wall_s": 123.456789, "folder": "runs/a [1]"}
    plain.tracker.summary("run finished", rows, notes={"wall_s": "(in all)", "steps_s": "(of those)"})
    assert plain.lines == ["run finished", "  steps   20", "  wall_s  123.5  (in all)", "  folder  runs/a [1]"]


def test_steps_without_a_beginning_are_shown(plain):
    plain.run_steps([7])
    assert plain.lines[0].startswith("training 7/7  reward 0.750")


def last_frame(text):
    """Return the lines of the last drawn display."""
    drawn = text.rsplit("\x1b[2K", 1)[-1]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).split("\n")


def test_a_terminal_gets_the_last_steps_and_a_bar_with_rate_and_time_left(live):
    live.tracker.begin("GRPO", total_steps=20)
    live.run_steps([0], metrics=VALIDATION)
    live.run_steps(range(1, 9), seconds=2.0)
    header, *rows, bar = last_frame(live.text)[:8]
    assert header.split() == ["step", "reward", "validation", "kl", "entropy", "speed"]
    assert [row.split()[0] for row in rows] == ["3", "4", "5", "6", "7", "8"]
    assert rows[0].split()[1:] == ["0.750", "0.0012", "0.234", "8,123", "tok/s"]
    assert re.fullmatch(
        r"GRPO +\S+ +8/20 +2.12 s/step +eta 26 s", bar.replace("\N{BOX DRAWINGS HEAVY HORIZONTAL}", "-")
    )


def test_a_validation_has_a_cell_where_it_is_new(live):
    live.tracker.begin("GRPO", total_steps=20)
    live.run_steps([1], metrics=STEP | VALIDATION)
    live.run_steps([2])
    live.tracker.log_late(2, {"val-core/arithmetic/acc/mean@1": 0.5})
    live.run_steps([3])
    header, *rows = last_frame(live.text)[:4]
    assert header.split()[:3] == ["step", "reward", "validation"]
    assert [row.split()[2] for row in rows] == ["0.968", "0.0012", "0.500"]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (20, ["step", "reward"]),
        (44, ["step", "reward", "kl", "entropy", "speed"]),
        (80, ["step", "reward", "kl", "entropy", "speed", "step time", "grad norm", "response"]),
        (
            160,
            ["step", "reward", "kl", "entropy", "speed", "step time", "grad norm", "response", "cut", "clipped", "lr"],
        ),
    ],
)
def test_as_many_columns_as_fit(width, columns):
    terminal = Terminal(is_terminal=True, width=width)
    more = {"perf/time_per_step": 3.25, "actor/grad_norm": 0.5, "response_length/mean": 17.0, "actor/lr": 1e-6}
    more |= {"response_length/clip_ratio": 0.25, "actor/pg_clipfrac": 0.001}
    terminal.tracker.begin("GRPO", total_steps=20)
    terminal.run_steps([1], metrics=STEP | more)
    lines = last_frame(terminal.text)
    terminal.tracker.close()
    assert re.split(r" {2,}", lines[0].strip()) == columns
    assert all(len(line) <= width for line in lines)


def test_lines_have_a_kl_that_is_0_by_design():
    file = io.StringIO()
    tracker = ConsoleTracker(console=Console(file=file, width=200), hidden=("actor/ppo_kl", "rollout_corr/kl"))
    tracker.log(1, STEP | {"actor/ppo_kl": -8.9e-9, "rollout_corr/kl": 1e-9})
    assert "  kl 0  " in file.getvalue()
    tracker.log(1, STEP | {"actor/kl_loss": 0.02})
    assert "kl 0.02" in file.getvalue()


def test_a_terminal_keeps_validations_and_phases_above_the_bar(live):
    with live.tracker.phase("starting vLLM"):
        assert "starting vLLM ... 0 s" in live.text
        live.clock.now += 3.0
    assert "starting vLLM: 3.0 s\n" in live.text
    live.tracker.begin("GRPO", total_steps=20)
    live.run_steps([1], metrics=STEP | VALIDATION)
    assert "GRPO 1/20  validation 0.968\n" in live.text
    live.clock.now += 1.0
    with live.tracker.phase("saving checkpoint"):
        assert "saving checkpoint ... 0 s" in live.text
    assert "saving checkpoint:" not in live.text


def test_a_terminal_is_given_back(live):
    live.tracker.begin("GRPO", total_steps=20)
    live.run_steps([1])
    live.tracker.summary("run finished", {"folder": "runs/" + "x" * 100})
    live.tracker.close()
    assert live.text.rfind("\x1b[?25h") > live.text.rfind("\x1b[?25l") > -1
    assert "run finished" in live.text
    assert "\N{HORIZONTAL ELLIPSIS}" not in live.text.split("run finished")[1]


def generation(**changed):
    given = {"prompt_uid": "p1", "input": "1 + 1", "output": "2", "policy_version": (3, 3), "source": "rollouter"}
    return GenerationSample(**(given | changed))


def test_the_worst_generations_have_a_line_each_and_so_has_a_right_one(plain):
    samples = [
        *(generation(score=1.0, output=f"right {index}") for index in range(10)),
        generation(score=0.0, ground_truth={"is": [2, True]}, output="3"),
        generation(score=-1.0, input="i" * 1000, output="o" * 1000, ground_truth="g" * 1000),
        *(generation(score=0.0, output=f"wrong {index}") for index in range(7)),
        generation(score=math.nan, output="y" * 100, failure="no verdict: " + "z" * 1000),
    ]
    plain.tracker.log_generations(40, "validation/generations", samples)

    def cut(letter):
        return letter * 28 + " ... " + letter * 27

    assert plain.lines == [
        "validation at step 40: 20 samples, 10 wrong; all are in generations.jsonl",
        f"  failed: 1 + 1 -> {cut('y')}  no verdict: {'z' * 46} ... {'z' * 57}",
        f"  wrong: {cut('i')} -> {cut('o')}  expected {cut('g')}",
        '  wrong: 1 + 1 -> 3  expected {"is": [2, true]}',
        "  right: 1 + 1 -> right 0",
    ]


def test_a_judged_accuracy_says_what_is_right_and_a_bare_score_of_another_scale_does_not(plain):
    judged = generation(score=0.3, components={"acc": 1.0})
    plain.tracker.log_generations(2, "validation/generations", [judged])
    plain.tracker.log_generations(4, "validation/generations", [generation(score=7.5), generation(score=1.0)])
    assert plain.lines == [
        "validation at step 2: 1 samples, 0 wrong",
        "  right: 1 + 1 -> 2",
        "validation at step 4: 2 samples, worst first",
        "  score 7.5: 1 + 1 -> 2",
        "  right: 1 + 1 -> 2",
    ]


def test_samples_are_shown_of_the_first_and_the_last_validation(plain):
    plain.tracker.begin("GRPO", total_steps=30)
    for step in (0, 10, 20, 30):
        for split in ("validation", "test"):
            plain.tracker.log_generations(step, f"{split}/generations", [generation(score=0.0)])
    assert [line.split(":")[0] for line in plain.lines if " at step " in line] == [
        "validation at step 0",
        "test at step 0",
        "validation at step 30",
        "test at step 30",
    ]


def test_a_resumed_run_shows_no_samples_before_its_last_validation(plain):
    plain.tracker.begin("GRPO", total_steps=30, done_steps=10)
    plain.tracker.log_generations(20, "validation/generations", [generation(score=0.0)])
    assert plain.lines == ["GRPO: 30 steps, 10 done before"]


def test_a_console_that_does_not_know_where_generations_are_names_no_place():
    file = io.StringIO()
    tracker = ConsoleTracker(console=Console(file=file, force_terminal=False, width=200))
    tracker.log_generations(1, "validation/generations", [generation(score=0.0)] * 4)
    assert file.getvalue().splitlines()[0] == "validation at step 1: 4 samples, 4 wrong"


def test_the_text_of_generations_stays_text(plain):
    hostile = "[bold]2[/bold] :smile:\n\x1b[2Jgone"
    failed = generation(input=hostile, ground_truth="\u202e2", failure="bad\r\nend\x07")
    plain.tracker.log_generations(1, "val/generations", [failed, generation(score=0.5, output=hostile)])
    assert plain.lines[1:] == [
        r"  failed: [bold]2[/bold] :smile:\n\x1b[2Jgone -> 2  expected \u202e2  bad\r\nend\x07",
        r"  score 0.5: 1 + 1 -> [bold]2[/bold] :smile:\n\x1b[2Jgone",
    ]
    assert "\x1b" not in plain.text


def test_a_terminal_keeps_generations_above_the_bar(live):
    live.tracker.begin("GRPO", total_steps=20)
    live.tracker.log_generations(1, "val/generations", [generation(output="[red]\x1b[2J", score=0.0)])
    assert r"  wrong: 1 + 1 -> [red]\x1b[2J" in live.text
    assert "\x1b[2J" not in live.text


class BrokenFile(io.StringIO):
    def write(self, text):
        raise OSError("terminal gone")


def test_a_console_that_fails_warns_once_and_is_silent():
    tracker = ConsoleTracker(console=Console(file=BrokenFile(), force_terminal=False))
    with structlog.testing.capture_logs() as logs:
        tracker.say("hello")
        with tracker.phase("starting"):
            pass
        tracker.log(1, STEP)
        tracker.summary("end", {})
        tracker.close()
    assert logs == [{"event": "console_failed", "log_level": "warning", "error": "OSError: terminal gone"}]


def test_a_reader_that_goes_away_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        tracker = ConsoleTracker(console=RunConsole(file=file, force_terminal=False))
        tracker.say("hello")
        tracker.say("again")
        tracker.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (65, "1:05"), (3723, "1:02:03")]
)
def test_durations_are_shown_in_words(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_text_garbles_the_terminal(is_terminal):
    terminal = Terminal(is_terminal=is_terminal, width=200)
    with terminal.tracker.phase("loading \x1b]0;1\x07\ud800"):
        terminal.tracker.say("said \x1b]0;2\x07\nand \x9b31m")
    terminal.tracker.begin("title \x1b]0;3\x07", total_steps=1)
    terminal.tracker.log(1, STEP)
    terminal.tracker.summary("done \x1b]0;4\x07", {"\x1b]0;5\x07": "\x1b]0;6\x07"})
    terminal.tracker.close()
    shown = terminal.file.getvalue()
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown
    for number in (1, 2, 3, 4, 5, 6):
        assert rf"\x1b]0;{number}\x07" in shown


def test_a_terminal_that_is_made_narrower_keeps_no_wrapped_row_of_the_display(live):
    live.tracker.begin("GRPO", total_steps=20)
    live.run_steps([1])
    wide, before = last_frame(live.text), len(live.text)
    live.tracker._console.width = 40
    live.tracker._tick()
    wrapped = sum((len(line) - 1) // 40 for line in wide)
    assert wrapped >= 1
    assert live.text[before:].count("\x1b[1A") == len(wide) - 1 + wrapped
    assert 0 < max(map(len, last_frame(live.text))) <= 40


def test_what_runs_is_below_the_bar(live):
    live.tracker.begin("GRPO", total_steps=20)
    with live.tracker.phase("rollouts of step 1", is_brief=True, detail=lambda: "3 of 8 \x1b[2J"):
        live.clock.now += 3.0
        live.tracker._tick()
        (runs,) = last_frame(live.text)[1:]
        assert runs[1:] == r" rollouts of step 1 ... 3 s, 3 of 8 \x1b[2J"


def test_colours_are_written_to_a_terminal():
    file = io.StringIO()
    target = Console(file=file, force_terminal=True, width=80, color_system="standard", _environ={})
    tracker = ConsoleTracker(console=target)
    tracker.begin("GRPO", total_steps=2)
    tracker.say("health: critical: collapse", style="bold red")
    tracker.log_generations(0, "validation/generations", [generation(score=0.0)])
    tracker.log(1, STEP)
    tracker.close()
    assert "\x1b[1;31mhealth: critical: collapse" in file.getvalue()
    assert "\x1b[31mwrong:\x1b[0m 1 + 1 -> 2" in file.getvalue()
    assert re.search(r"\x1b\[36m *0\.750", file.getvalue())
