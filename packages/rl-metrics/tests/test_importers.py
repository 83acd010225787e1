import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, NotReadyError
from rl_metrics.cli import main
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.importers import dumped, run_writer, verl
from rl_metrics.importers.run_writer import translation
from rl_metrics.importers.trl import import_trl
from rl_metrics.importers.verl import import_verl, read_log
from rl_metrics.run_files.run_record import open_run

SAMPLES = Path(__file__).parent / "samples"
VERL = SAMPLES / "verl"
TRL = SAMPLES / "trl"
SCRIPT = "<script>alert(1)</script>"
NAN = float("nan")


def column(run, name):
    return run.history.get(name).tolist()


def test_two_attempts_of_verl_become_one_run(tmp_path):
    files = [VERL / "attempt-1.jsonl", VERL / "attempt-2.jsonl"]
    imported = import_verl(files, tmp_path / "run", rollouts=VERL / "rollouts", validation=VERL / "validation")
    assert (imported.num_rows, imported.num_rollouts, imported.num_generations) == (8, 12, 8)
    assert imported.other == ("global_seqlen/max", "global_seqlen/mean", "global_seqlen/min", "val-aux/num_turns/mean")
    run = open_run(tmp_path / "run")
    assert run.history.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.isnan(run.history.times).all()
    np.testing.assert_array_equal(column(run, "critic/rewards/mean"), [NAN, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    np.testing.assert_array_equal(
        column(run, "val-core/openai/gsm8k/acc/mean@4"), [0.25, NAN, 0.35, NAN, 0.45, NAN, 0.55]
    )
    assert column(run, "other/global_seqlen/min")[1:] == [1210.0] * 6
    again = json.loads((VERL / "attempt-2.jsonl").read_text().splitlines()[0])
    assert column(run, "timing_s/gen")[3] == again["data"]["timing_s/gen"]
    assert run.history.values
    assert all(name in DEFINITIONS for name in run.history.values)
    assert run.events[0]["event"] == "run_imported"
    assert run.events[0]["trainer"] == "verl"
    assert not run.is_finished


def test_dumped_generations_of_verl(tmp_path):
    import_verl([], tmp_path / "run", rollouts=VERL / "rollouts", validation=VERL / "validation")
    run = open_run(tmp_path / "run")
    assert len(run.history.steps) == 0
    rows = list(run.rollouts())
    assert [row.step for row in rows] == [1] * 6 + [2] * 6
    assert [row.session for row in rows] == [0, 1, 2] * 4
    assert len({row.problem for row in rows}) == 2
    assert len({row.prompt_uid for row in rows}) == 4
    assert rows[0].problem == rows[6].problem
    (script,) = [row for row in rows if row.step == 1 and row.response == SCRIPT]
    assert (script.reward, script.components, script.ground_truth) == (0.0, {"acc": 0.0}, "21")
    assert (script.policy_version, script.finish, script.tokens) == (0, "unknown", ())
    assert rows[6].policy_version == 1
    assert [(table.step, table.name, len(table.samples)) for table in run.generations] == [
        (0, "val/generations", 4),
        (2, "val/generations", 4),
    ]
    assert run.generations[1].samples[0].input == "user\n37 + 58 =\nassistant\n"


def test_the_console_of_verl_says_the_same_as_its_files(tmp_path):
    import_verl([VERL / "attempt-1.jsonl", VERL / "attempt-2.jsonl"], tmp_path / "files")
    import_verl([VERL / "console.txt"], tmp_path / "console")
    files, console = open_run(tmp_path / "files").history, open_run(tmp_path / "console").history
    assert console.steps.tolist() == files.steps.tolist()
    assert set(console.values) == set(files.values)
    for name in files.values:
        np.testing.assert_array_equal(console.get(name), files.get(name))


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("step:1 - actor/lr:1e-06", (1, {"actor/lr": 1e-06})),
        ('{"step": 4, "data": {"a": 1}}', (4, {"a": 1})),
        ('{"step": 4, "data": {"a": NaN}}', None),
        ('{"step": 4.0, "data": {"a": 1}}', (4, {"a": 1})),
        ('{"step": 4.5, "data": {"a": 1}}', None),
        ('{"step": -4, "data": {"a": 1}}', None),
        ('{"step": 4, "data": [1]}', None),
        ('{"step": 4, "data": {"a"', None),
        ('{"step": 4, "a": 1}', None),
    ],
)
def test_lines_of_verl_are_read_or_skipped(tmp_path, line, read):
    found = logged(tmp_path, f"{line}\n".encode())
    if "NaN" in line:
        assert np.isnan(found[0][1]["a"])
    else:
        assert found == ([] if read is None else [read])


def logged(folder, content):
    (folder / "log").write_bytes(content)
    return list(read_log(folder / "log"))


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b" \t", b"\xef\xbb\xbf "])
def test_a_byte_order_mark_and_white_space_before_a_line_are_passed_over(tmp_path, before):
    for line in (b'{"step": 4, "data": {"a/x": 0.5}}\n', b"step:4 - a/x:0.5\n"):
        assert logged(tmp_path, before + line) == [(4, {"a/x": 0.5})]
    assert logged(tmp_path, before + b"\n") == []


def test_a_torn_last_line_of_a_console_has_no_number(tmp_path):
    assert logged(tmp_path, b"step:7 - actor/grad_norm:0.2") == []
    assert logged(tmp_path, b'{"step": 7, "data": {"a": 0.2}}') == [(7, {"a": 0.2})]


def test_old_names_of_verl(tmp_path):
    row = {"actor/entropy_loss": 0.5, "mfu/{0.__class__}": 0.3, "val/test_score/openai/gsm8k": 0.75}
    row |= {"mismatch/mismatch_kl": 0.01, "mismatch/rollout_is_mean": 0.99, "mismatch/rollout_is_veto_fraction": 0.0}
    row |= {"critic/kl": 0.004, "critic/kl_coeff": 0.1, "timing_s/agent_loop/slowest/tool_calls": 2.0}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "data": row}) + "\n")
    import_verl([tmp_path / "log.jsonl"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert column(run, "actor/entropy") == [0.5]
    assert column(run, "val-core/openai/gsm8k/reward/mean@1") == [0.75]
    assert column(run, "perf/mfu/{0.__class__}") == [0.3]  # the name is not used as a format string
    assert column(run, "actor/reference_kl") == [0.004]
    assert column(run, "actor/kl_coef") == [0.1]
    assert column(run, "agent_loop/slowest/tool_calls") == [2.0]
    assert column(run, "rollout_corr/kl") == [0.01]
    assert column(run, "rollout_corr/rollout_is_mean") == [0.99]
    assert column(run, "other/mismatch/rollout_is_veto_fraction") == [0.0]


def test_what_verl_logs_of_a_step_in_parts_is_put_together(tmp_path):
    parts = [(1, "a"), (1, "val/b"), (2, "a"), (1, "late"), (3, "a"), (2, "a"), (2, "val/b")]
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"step": step, "data": {name: number}}) + "\n" for number, (step, name) in enumerate(parts))
    )
    imported = import_verl([tmp_path / "log.jsonl"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.history.steps.tolist() == [1, 2]  # the second "a" of step 2 comes from a resumed attempt
    assert column(run, "other/a") == [0.0, 5.0]
    assert column(run, "other/val/b") == [1.0, 6.0]
    np.testing.assert_array_equal(column(run, "other/late"), [3.0, NAN])
    assert imported.other == ("a", "late", "val/b")


def test_the_history_of_trl_is_imported(tmp_path):
    imported = import_trl([TRL], tmp_path / "run", completions=TRL / "completions")
    assert (imported.num_rows, imported.num_rollouts, imported.num_generations) == (7, 8, 4)
    run = open_run(tmp_path / "run")
    assert run.history.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(column(run, "critic/rewards/mean"), [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(column(run, "critic/score/mean"), [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(column(run, "reward/accuracy_reward/mean"), [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(column(run, "val-core/eval/reward/mean@1"), [NAN, 0.3, NAN, 0.6])
    np.testing.assert_allclose(column(run, "actor/pg_clipfrac"), [0.002, 0.004, 0.006, 0.008])
    assert column(run, "rollout/groups_without_spread_ratio") == [0.25] * 4
    assert column(run, "timing_s/step") == column(run, "perf/time_per_step") == [5.25] * 4
    assert column(run, "other/train_runtime")[3] == 61.2
    assert run.history.values
    assert all(name in DEFINITIONS for name in run.history.values)
    assert run.is_finished
    rows = list(run.rollouts())
    assert [(row.step, row.response, row.reward) for row in rows[:2]] == [(1, "95", 1.0), (1, SCRIPT, 0.0)]
    assert rows[0].components == {"accuracy_reward": 1.0}
    assert [(table.step, len(table.samples)) for table in run.generations] == [(2, 4)]


def test_the_newest_checkpoint_of_trl_is_taken(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step, "loss": 0.5}]}))
    (tmp_path / "checkpoint-11").mkdir()
    import_trl([tmp_path], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.history.steps.tolist() == [10]
    assert not run.is_finished


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"log_history": {}}', '{"log_history": [{"step"', "\x00", "[" * 9999]
)
def test_what_is_no_state_of_a_trainer_is_refused(tmp_path, content):
    (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(DataError, match=r"must be a trainer_state\.json"):
        import_trl([tmp_path], tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer_state.json"]


def test_rows_of_a_history_that_are_none_are_left_out(tmp_path):
    history = [3, None, {}, {"reward": None, "step": 1}, {"step": True, "loss": 1}, {"step": 2**70, "loss": 1}]
    history += [{"step": 1, "loss": "low"}]
    history += [{"step": 2, "loss": NAN, "note": "text", "nested": {"a": 1}, "on": True}, {"step": 3, "loss": 10**400}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    with structlog.testing.capture_logs() as logs:
        import_trl([tmp_path], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.history.steps.tolist() == [2, 3]
    assert np.isnan(column(run, "actor/loss")).all()
    assert list(run.history.values) == ["actor/loss"]
    assert [(one["event"], one["count"], one["first_row"]) for one in logs] == [("rows_without_step", 2, 3)]


@pytest.mark.one_python("its work is pyarrow's")
def test_completions_in_parquet_are_imported(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "step": [3, 3],
        "prompt": [[{"role": "user", "content": "1 + 1"}]] * 2,
        "completion": ["2", SCRIPT],
        "format": [0.5, 0.25],
        "accuracy": [1.0, None],
        "advantage": [0.7, -0.7],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "completions_00003.parquet")
    import_trl([], tmp_path / "run", completions=tmp_path)
    rows = list(open_run(tmp_path / "run").rollouts())
    assert [(row.response, row.reward, row.session) for row in rows] == [("2", 1.5, 0), (SCRIPT, 0.25, 1)]
    assert json.loads(rows[0].prompt) == [{"role": "user", "content": "1 + 1"}]
    (tmp_path / "completions_00004.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(DataError, match="cannot be used: Parquet magic bytes not found"):
        import_trl([], tmp_path / "other", completions=tmp_path)


def test_parquet_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "completions_00003.parquet").write_bytes(b"PAR1")
    with pytest.raises(NotReadyError, match=r"rl-metrics\[parquet\]"):
        import_trl([], tmp_path / "run", completions=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["completions_00003.parquet"]


def test_an_import_replaces_an_earlier_one_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    import_verl([VERL / "attempt-1.jsonl"], run, rollouts=VERL / "rollouts")
    (run / "report.html").write_text("mine")
    import_verl([VERL / "attempt-2.jsonl"], run)
    assert open_run(run).history.steps.tolist() == [3, 4, 5, 6]
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "metrics.jsonl", "report.html"]
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.jsonl").write_text('{"step":1}\n')
    with pytest.raises(DataError, match="must be a new folder"):
        import_verl([VERL / "attempt-1.jsonl"], own)
    assert (own / "metrics.jsonl").read_text() == '{"step":1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "run"]


def test_files_without_anything_leave_no_trace(tmp_path):
    (tmp_path / "log.txt").write_text("nothing of it\n" * 3 + "step:1 - a:1\n")
    with pytest.raises(DataError, match="no metrics or responses of verl found in"):
        import_verl([tmp_path / "log.txt"], tmp_path / "run")
    with pytest.raises(DataError, match="there is no such file or folder"):
        import_verl([tmp_path / "missing.jsonl"], tmp_path / "run")
    with pytest.raises(DataError, match="must be a folder"):
        import_verl([], tmp_path / "run", rollouts=tmp_path / "missing")
    with pytest.raises(DataError, match="must be a folder"):
        import_trl([], tmp_path / "run", completions=tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([b"step:1 - a/b:1", b"[x] step:2 - a/b:1", b'{"step":1,"data":{"a":1}}']),
        )
    )
)
def test_any_bytes_are_read_or_refused(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("any")
    log = folder / "log"
    log.write_bytes(b"\n".join(lines))
    (folder / "dumps").mkdir()
    shutil.copy(log, folder / "dumps" / "1.jsonl")
    shutil.copy(log, folder / "dumps" / "completions_1.jsonl")
    with structlog.testing.capture_logs():
        for read in (
            lambda: import_verl([log], folder / "run", rollouts=folder / "dumps", validation=folder / "dumps"),
            lambda: import_trl([log], folder / "run", completions=folder / "dumps"),
        ):
            try:
                assert read().num_rows > 0
            except DataError:
                assert not (folder / "run" / "rollouts.jsonl").exists()


def test_of_a_dump_so_many_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(dumped, "MAX_ROWS", 4)
    assert import_verl([], tmp_path / "run", rollouts=VERL / "rollouts").num_rollouts == 8


def test_every_name_of_verls_table_is_defined_here():
    parts = {"source": "openai/gsm8k", "component": "accuracy", "role": "actor"}
    names = [name.format(**parts) for ours in verl.NAMES.values() for name in ours]
    assert len(names) >= len(verl.NAMES) > 20
    assert [name for name in names if name not in DEFINITIONS] == []


def test_names_are_translated_by_the_first_entry_that_fits():
    names = translation({"a/{one}/mean": ("b/{one}",), "a/{source}": ("c/{source}", "d")}, has_our_names=True)
    assert names("a/x/mean") == ("b/x",)
    assert names("a/x/y/mean") == ("c/x/y/mean", "d")
    assert names("a.x") == ("other/a.x",)
    assert names("actor/entropy") == ("actor/entropy",)
    assert translation({}, has_our_names=False)("actor/entropy") == ("other/actor/entropy",)
    assert len(names("x" * 1000)) == 1
    assert len(names("x" * 1000)[0]) == run_writer.MAX_NAME + len("other/")


def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(step, responses):
        raise KeyError(step)

    monkeypatch.setattr(run_writer, "as_rollouts", fail)
    num_open = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(KeyError, match="1"):
        import_verl([VERL / "attempt-1.jsonl"], tmp_path / "run", rollouts=VERL / "rollouts")
    assert list(tmp_path.iterdir()) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open


def test_other_verbs_read_what_was_imported(tmp_path, capsys):
    import_verl([VERL / "attempt-1.jsonl", VERL / "attempt-2.jsonl"], tmp_path / "verl", rollouts=VERL / "rollouts")
    import_trl([TRL], tmp_path / "trl", completions=TRL / "completions")
    runs = [str(tmp_path / "verl"), str(tmp_path / "trl")]
    for run in runs:
        main(["check", run])
        assert "entropy" in capsys.readouterr().out
        assert main(["report", run]) == 0
        assert SCRIPT not in (Path(run) / "report.html").read_text()
    capsys.readouterr()
    assert main(["compare", *runs, "--metric", "critic/*/mean", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["metric"] for row in document["results"]] == ["critic/rewards/mean", "critic/score/mean"]
    assert document["results"][0]["difference"] == pytest.approx(0.25 - 0.45)


def test_the_command_imports_or_names_the_mistake(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["import", "verl", str(VERL / "attempt-1.jsonl"), "--into", run]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("run: 4 rows of metrics, 0 trajectories, 0 validation samples")
    assert said[1].startswith("kept as other/NAME, because they have no counterpart here: global_seqlen/max, ")
    assert main(["import", "trl", str(TRL / "checkpoint-4" / "trainer_state.json"), "--into", run]) == 0
    assert main(["import", "verl", str(tmp_path / "missing"), "--into", run]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["import", "trl", str(tmp_path), "--into", run]) == 2


def test_attempts_in_the_wrong_order_are_said(tmp_path):
    first, second = VERL / "attempt-1.jsonl", VERL / "attempt-2.jsonl"
    with structlog.testing.capture_logs() as logs:
        import_verl([first, second], tmp_path / "run")
    assert logs == []
    with structlog.testing.capture_logs() as logs:
        import_verl([second, first], tmp_path / "run")
    (warning,) = logs
    assert (warning["event"], warning["file"], warning["before"]) == ("attempts_out_of_order", str(first), str(second))
    assert (warning["first_step"], warning["its_first_step"]) == (0, 3)


def test_attempts_of_trl_in_the_wrong_order_are_said(tmp_path):
    for name, steps in (("first", (1, 2)), ("second", (2, 3))):
        history = [{"step": step, "loss": 0.5} for step in steps]
        (tmp_path / f"{name}.json").write_text(json.dumps({"log_history": history}))
    files = [tmp_path / "second.json", tmp_path / "first.json"]
    for order, expected in ((files[::-1], []), (files, ["attempts_out_of_order"])):
        with structlog.testing.capture_logs() as logs:
            import_trl(order, tmp_path / "run")
        assert [one["event"] for one in logs] == expected


def test_a_folder_among_the_files_of_verl_is_refused_with_advice(tmp_path, capsys):
    assert main(["import", "verl", str(VERL / "rollouts"), "--into", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"{VERL}/rollouts must be a file of verl's metrics or console, not a folder" in said
    assert "--rollouts" in said
    assert not (tmp_path / "run").exists()


def test_every_name_without_a_meaning_here_is_listed(tmp_path, capsys):
    names = [f"name-{index:03}-{'x' * 60}" for index in range(100)]
    (tmp_path / "a.jsonl").write_text(json.dumps({"step": 1, "data": dict.fromkeys([*names, "\x1b[31m"], 1.0)}) + "\n")
    assert main(["import", "verl", str(tmp_path / "a.jsonl"), "--into", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.removeprefix("kept as other/NAME, because they have no counterpart here: ").split(", ") == [
        "\\x1b[31m",
        *names,
    ]


def test_lines_of_verl_without_a_step_are_said_once(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [{"step": step, "data": {"actor/entropy": 0.5}} for step in (1.0, 2.5, None, 2.0, -1, 1e300)]
    rows += [{"data": {"actor/entropy": 0.5}}, {"step": "9", "data": {}}, {"step": "9"}]
    log.write_bytes(b"\xef\xbb\xbf" + b"\n \t".join(json.dumps(row).encode() for row in rows))
    with structlog.testing.capture_logs() as logs:
        import_verl([log], tmp_path / "run")
    assert open_run(tmp_path / "run").history.steps.tolist() == [1, 2]
    assert logs == [
        {"event": "lines_without_step", "log_level": "warning", "path": str(log), "count": 5, "first_line": 2}
    ]


PHASES = {"gen": 30.0, "reward": 0.5, "old_log_prob": 5.0, "adv": 0.1, "update_actor": 20.0}


@pytest.mark.parametrize(
    ("beside", "within", "left"),
    [
        ({"testing": 200.0}, 200.0, 58.0),  # verl 00401103: part of the step
        ({"testing": 200.0}, 0.0, 58.0),  # verl 0094eb20: outside the step
        ({"testing": 200.0, "save_checkpoint": 30.0}, 230.0, 58.0),
        ({"testing": 200.0, "save_checkpoint": 30.0}, 30.0, 58.0),
        ({"testing": 0.0}, 0.0, 58.0),
        ({"testing": "long", "save_checkpoint": NAN}, 0.0, 58.0),
        ({"testing": -5.0}, 0.0, 58.0),
    ],
)
def test_a_step_of_verl_is_without_its_validation_and_checkpoint(beside, within, left):
    step = left + within
    values = {f"timing_s/{name}": seconds for name, seconds in (PHASES | beside | {"step": step}).items()}
    values |= {"perf/time_per_step": step, "perf/throughput": 1000.0 / step, "actor/entropy": 0.5}
    alone = verl.step_alone(values)
    assert alone["timing_s/step"] == alone["perf/time_per_step"] == pytest.approx(left)
    assert alone["perf/throughput"] == pytest.approx(1000.0 / left)
    changed = {"timing_s/step", "perf/time_per_step", "perf/throughput"}
    assert alone == values | {name: alone[name] for name in changed}


def test_a_step_of_verl_is_never_without_all_its_time():
    alone = {"timing_s/step": 10.0, "timing_s/testing": 10.0}
    assert verl.step_alone(alone) == alone
    assert verl.step_alone({"timing_s/testing": 10.0}) == {"timing_s/testing": 10.0}
    short = {"timing_s/step": 10.0, "timing_s/testing": 4.0, "perf/time_per_step": 3.0}
    assert verl.step_alone(short) == short | {"timing_s/step": 6.0}


@pytest.mark.parametrize(
    ("wrong", "path", "said"),
    [
        (
            "trl",
            VERL / "console.txt",
            "is a log of verl, not a state of TRL's trainers. Import it with: rl-metrics import verl",
        ),
        ("trl", VERL / "attempt-1.jsonl", f"Import it with: rl-metrics import verl {VERL}/attempt-1.jsonl --into RUN"),
        (
            "verl",
            TRL / "checkpoint-4" / "trainer_state.json",
            "is a state of TRL's trainers, not a log of verl. Import it",
        ),
        ("verl", TRL, f"Import it with: rl-metrics import trl {TRL} --into RUN"),
    ],
)
def test_the_wrong_importer_names_the_right_one(tmp_path, capsys, wrong, path, said):
    assert main(["import", wrong, str(path), "--into", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("doctor",),
        ("report",),
        ("serve",),
        ("compare", str(VERL)),
    ],
)
def test_a_run_that_needs_an_import_is_told_its_importer(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    verb, *rest = words
    for path, trainer in ((VERL / "console.txt", "verl"), (VERL / "attempt-1.jsonl", "verl"), (TRL, "trl")):
        assert main([verb, str(path), *rest]) == 2
        said = capsys.readouterr().err.replace("\n", " ")
        assert "not a run of this project." in said
        assert f"Import it with: rl-metrics import {trainer} {path} --into RUN" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("import", "verl", "a.log"),
        ("import", "trl", "a.log"),
        ("import", "verl", "--rollouts", "a.log"),
        ("check", "a.log"),
    ],
)
def test_a_path_where_nothing_is_gets_a_sentence(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--into", "run"] if words[0] == "import" else words) == 2
    assert re.match(r"rl-metrics: error: a\.log must be (a|the) .*(no such|nothing there)", capsys.readouterr().err)


def test_an_import_is_not_told_of_settings_that_its_trainer_lacks(tmp_path, capsys):
    assert main(["import", "verl", str(VERL / "console.txt"), "--into", str(tmp_path / "run")]) == 0
    run = tmp_path / "run"
    main(["doctor", str(run)])
    assert "metrics.log_rollouts" not in capsys.readouterr().out
    (run / "events.jsonl").unlink()
    main(["doctor", str(run)])
    assert "metrics.log_rollouts" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["trl", "verl"])
@pytest.mark.parametrize("path", ["", "metrics.jsonl"])
def test_a_run_of_this_project_needs_no_import(tmp_path, capsys, wrong, path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.jsonl").write_text('{"step":1,"time":2.0,"actor/entropy":0.5}\n')
    assert main(["import", wrong, str(own / path), "--into", str(tmp_path / "run")]) == 2
    assert f"needs no import. Use: rl-metrics check {own / path}" in capsys.readouterr().err


def test_what_nobody_wrote_gets_no_advice(tmp_path, capsys):
    (tmp_path / "log.txt").write_text("epoch 1, loss 0.5\n")
    assert main(["import", "trl", str(tmp_path / "log.txt"), "--into", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert (
        "log.txt must be a trainer_state.json of TRL's trainers; found no log_history, or a truncated file. Printed"
        in said
    )
