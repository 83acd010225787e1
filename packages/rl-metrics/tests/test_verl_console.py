import pytest
import structlog

from rl_metrics.importers.verl import import_verl
from rl_metrics.importers.verl_console import bars_of_line, seems_step, step_of_line
from rl_metrics.run_files.run_record import open_run


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("step:1 - actor/lr:1e-06", (1, {"actor/lr": 1e-06})),
        ("step:12 - a/x:-0.5 - b:np.float64(0.25) - c:3", (12, {"a/x": -0.5, "b": 0.25, "c": 3.0})),
        ("\x1b[36m(TaskRunner pid=1)\x1b[0m step:2 - a/x:1.0 ", (2, {"a/x": 1.0})),
        (" \tstep:2 - a/x:1.0\r", (2, {"a/x": 1.0})),
        (
            "(TaskRunner pid=1, ip=10.0.0.1) step:2 - a/x:1.\x1b[32m [repeated 2x across cluster]\x1b[0m",
            (2, {"a/x": 1.0}),
        ),
        ("(TaskRunner(n=2) pid=1) (pid=2) step:2 - a/x:1.0", (2, {"a/x": 1.0})),
        ("2025-11-02 10:00:01,123 step:2 - a/x:1.0", (2, {"a/x": 1.0})),
        ("[2025-11-02T10:00:01Z] step:2 - a/x:1.0", (2, {"a/x": 1.0})),
        ("Steps:   5%|#   | 1/6 [00:45<03:45, 45.1s/it]step:2 - a/x:1.0", (2, {"a/x": 1.0})),
        ("(main_task pid=7) Steps: 5%|#   | 1/6 [00:4\r10it [00:01, 9.9it/s]step:2 - a/x:1.0", (2, {"a/x": 1.0})),
        ("step:2 - a/x:tensor(0.5000) - a/y:tensor(1.)", (2, {"a/x": 0.5, "a/y": 1.0})),
        ("step:2 - a/x:tensor(-5e-1, device='cuda:0', dtype=torch.float64)", (2, {"a/x": -0.5})),
        ("step:2 - a/x:tensor([0.5]) - a/y:tensor(0.5", None),
        ("(TaskRunner pid=1) [response] my plan: step:0 - x/y:1", None),
        ("(TaskRunner pid=1) the model: step:0 - a/x:1.0", None),
        ('(TaskRunner pid=1) "step:0 - a/x:1.0"', None),
        ("(TaskRunner pid=1) step:0 - x:1 - and / or:2", None),
        (
            "  5%|#   | 1/6 [00:45<03:45]\r(main_task pid=7) step:3 - val/test_score/x:y:0.104",
            (3, {"val/test_score/x:y": 0.104}),
        ),
        ("step:1 - a:text - b/x:0.104", (1, {"b/x": 0.104})),
        ("step:1 - a:1.0 and more", None),
        ("a step:1 of many", None),
        ("substep:1 - a:1", None),
        ("step:x - a:1", None),
    ],
)
def test_lines_of_a_console_are_read_or_skipped(line, read):
    assert step_of_line(line) == read


@pytest.mark.parametrize(
    ("line", "seems"),
    [
        ("pod-1 | step:2 - a/x:1.0", True),
        ("(TaskRunner pid=1) [response] step:0 - x/y:1", True),
        ("[response] in step:2 - we add", False),
        ("[response] step:0 - x:1", False),
    ],
)
def test_what_seems_a_step_after_other_text(line, seems):
    assert step_of_line(line) is None
    assert seems_step(line) == seems


def console(steps, before_last=""):
    lines = [f"(TaskRunner pid=1) step:{step} - critic/score/mean:{step / 100} - actor/entropy:0.4" for step in steps]
    return "\n".join([*lines[:-1], *([before_last] if before_last else []), lines[-1]]) + "\n"


def test_a_response_that_looks_like_a_step_replaces_nothing(tmp_path):
    log = tmp_path / "log.txt"
    for response, expected in (
        ("(TaskRunner pid=1) [response] my plan: step:0 - x:1", []),
        ("(TaskRunner pid=1) step:0 - x:1", []),
        ("(TaskRunner pid=1) [response] step:0 - x/y:1", [("console_lines_passed_over", 1, 100)]),
    ):
        log.write_text(console(range(1, 101), response))
        with structlog.testing.capture_logs() as logs:
            import_verl([log], tmp_path / "run")
        assert open_run(tmp_path / "run").history.steps.tolist() == list(range(1, 101))
        assert [(one["event"], one["count"], one["first_line"]) for one in logs] == expected


def test_steps_that_begin_again_within_a_file_are_a_resumed_attempt_and_said(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(console([1, 2, 3, 4, 2, 3, 4, 5]))
    with structlog.testing.capture_logs() as logs:
        import_verl([log], tmp_path / "run")
    assert open_run(tmp_path / "run").history.steps.tolist() == [1, 2, 3, 4, 5]
    (warning,) = logs
    assert (warning["event"], warning["file"]) == ("steps_begin_again", str(log))
    assert (warning["step"], warning["after_step"]) == (2, 4)
    log.write_text(console([2, 1] * 50))
    with structlog.testing.capture_logs() as logs:
        import_verl([log], tmp_path / "run")
    assert [one["event"] for one in logs] == ["steps_begin_again"] * 10


BAR = "Training Progress:  10%|#  | {step}/20 [00:30<02:50, 10.0s/it, loss={loss}, kl=0.002, reward=0.4, mode=a]"
REST = {"kl": 0.002, "reward": 0.4}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (BAR.format(step=2, loss=0.1), {2: {"loss": 0.1, **REST}}),
        ("(TaskRunner pid=1) 3it [00:30, 1.5it/s, loss=-1e-3]", {3: {"loss": -0.001}}),
        (
            BAR.format(step=1, loss=9) + "\r" + BAR.format(step=2, loss=0.1),
            {1: {"loss": 9.0, **REST}, 2: {"loss": 0.1, **REST}},
        ),
        ("5%|#  | 1/20 [00:30<02:50, 10.0s/it]", {}),
        ("the bar says 1/20 [00:30<02:50, 10.0s/it, loss=1]", {}),
    ],
)
def test_metrics_of_progress_bars(line, read):
    assert bars_of_line(line) == read


def test_bars_are_read_without_lines_of_steps_and_counted_with_them(tmp_path):
    log = tmp_path / "log.txt"
    bars = "\r".join(BAR.format(step=step, loss=1 / step) for step in (1, 2, 2, 3)) + "\n"
    log.write_text("loading\n" + bars)
    imported = import_verl([log], tmp_path / "run")
    history = open_run(tmp_path / "run").history
    assert history.steps.tolist() == [1, 2, 3]
    assert history.values["actor/loss"].tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    assert history.values["critic/rewards/mean"].tolist() == [0.4] * 3
    assert imported.other == ("kl",)
    log.write_text(bars + console([1, 2]))
    with structlog.testing.capture_logs() as logs:
        import_verl([log], tmp_path / "run")
    assert open_run(tmp_path / "run").history.steps.tolist() == [1, 2]
    assert [(one["event"], one["steps"]) for one in logs] == [("progress_bars_passed_over", 3)]


SAMPLE = """[prompt] system
You add.
[response] First,
  [score] is a word: 4
[ground_truth] 4
[score] 1.0
[acc] True
"""


def test_printed_samples_belong_to_the_next_step(tmp_path):
    log = tmp_path / "log.txt"
    prefixed = "".join(f"\x1b[36m(TaskRunner pid=1)\x1b[0m {line}\n" for line in SAMPLE.splitlines())
    torn = "[prompt] a\n[response] b\n"
    log.write_text(prefixed + SAMPLE + "done\n" + console([1]) + torn + SAMPLE + console([2]) + SAMPLE)
    with structlog.testing.capture_logs() as logs:
        imported = import_verl([log], tmp_path / "run")
    assert imported.num_generations == 3
    first, second = open_run(tmp_path / "run").generations
    assert (first.step, len(first.samples), second.step, len(second.samples)) == (1, 2, 2, 1)
    (sample, _) = first.samples
    assert (sample.input, sample.output) == ("system\nYou add.", "First,\n  [score] is a word: 4")
    assert (sample.score, sample.components, sample.ground_truth) == (1.0, {"acc": 1.0}, "4")
    (warning,) = logs
    assert warning["event"] == "printed_samples_passed_over"
    assert (warning["incomplete"], warning["without_a_step_after_them"]) == (1, 1)


def test_samples_of_a_folder_replace_printed_ones_and_incomplete_rows_are_counted(tmp_path):
    log, folder = tmp_path / "log.txt", tmp_path / "validation"
    log.write_text(SAMPLE + console([1]))
    folder.mkdir()
    rows = '{"input": "a", "output": "b", "score": 1}\n{"input": "a"}\n{"input":[],"output":""}\n'
    (folder / "1.jsonl").write_text(rows)
    with structlog.testing.capture_logs() as logs:
        imported = import_verl([log], tmp_path / "run", validation=folder)
    assert imported.num_generations == 1
    assert [(one["event"], one.get("count", one.get("incomplete"))) for one in logs] == [
        ("printed_samples_passed_over", 1),
        ("rows_passed_over", 2),
    ]
