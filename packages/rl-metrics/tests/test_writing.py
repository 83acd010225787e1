import json
import os
import subprocess
import sys

import pytest
from invented_runs import InventedRun
from read_report import read_report, scripts_of

from rl_core.errors import SettingsError
from rl_metrics.cli import main
from rl_metrics.report import write_report
from rl_metrics.report.page import page_head
from rl_metrics.run_files.run_record import open_run

HOSTILE = ("</script><script>hacked()</script>", "<!--<script>", "nul\0", "\u202eturned", '"><img onerror=hacked()>')


@pytest.fixture
def folder(tmp_path):
    InventedRun(steps=6, trajectories=8).write(tmp_path / "run", texts=HOSTILE)
    return tmp_path / "run"


def test_everything_comes_back(folder, tmp_path):
    write_report([open_run(folder)], tmp_path / "report.html")
    (run,) = read_report(tmp_path / "report.html")
    record = open_run(folder)
    rows = list(record.rollouts())
    assert run.header["name"] == "run"
    assert (run.header["step"], run.header["steps"], run.header["is_finished"]) == (6, 6, True)
    assert [text[:2] for text in run.texts] == [[row.prompt, row.response] for row in rows]
    assert run.index["step"].tolist() == [row.step for row in rows]
    assert {metric["name"] for metric in run.header["curves"]} == set(record.history.values)
    assert [one["name"] for one in run.header["distributions"]] == [
        "distribution/reward",
        "distribution/response_length",
    ]
    assert run.header["probes"][0]["candidates"] == ["5", "4", "6"]
    assert len(run.header["slowest"]) == 6
    assert [text[1] for text in run.sample_texts] == [one.output for one in record.generations[0].samples]
    assert run.samples["step"].tolist() == [5] * 10
    assert ["trainer.steps", "6"] in run.header["settings"]
    assert run.header["verdict"]["checks"]


def test_slowest_sessions_lead_to_their_trajectories(folder, tmp_path):
    rows = list(open_run(folder).rollouts())
    place = {"session_index": rows[9].session, "output_index": rows[9].output, "generate_s": 100.0}
    events = [
        {"time": 1.0, "event": "slowest_session", "prompt_uid": rows[9].prompt_uid, **place},
        {"time": 2.0, "event": "slowest_session", "prompt_uid": "not recorded", **place},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    write_report([open_run(folder)], tmp_path / "a.html")
    (run,) = read_report(tmp_path / "a.html")
    assert [one.get("row") for one in run.header["slowest"][:2]] == [9, None]


def test_step_0_is_none_that_was_done(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val": 1}\n{"step": 1, "val": 2}\n')
    write_report([open_run(tmp_path)], tmp_path / "a.html")
    assert read_report(tmp_path / "a.html")[0].header["steps"] == 1


def test_no_text_of_a_run_is_in_the_page_itself(folder, tmp_path):
    write_report([open_run(folder)], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "hacked" not in page
    assert "\0" not in page
    kinds = [attributes.get("type") for attributes, _ in scripts_of(page)]
    assert kinds.count(None) == 2  # the library and the page's own script


def test_several_runs_are_written_into_one_report(folder, tmp_path):
    InventedRun(steps=3, trajectories=8, is_finished=False).write(tmp_path / "other" / "run")
    write_report([open_run(folder), open_run(tmp_path / "other" / "run")], tmp_path / "a.html")
    first, second = read_report(tmp_path / "a.html")
    assert [first.header["name"], second.header["name"]] == ["run (1)", "run (2)"]
    assert [first.header["is_finished"], second.header["is_finished"]] == [True, False]


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    write_report([open_run(tmp_path)], tmp_path / "a.html")
    (run,) = read_report(tmp_path / "a.html")
    assert (run.header["step"], run.header["curves"], run.texts) == (0, [], [])


def test_metrics_alone_give_a_report(tmp_path):
    (tmp_path / "theirs.jsonl").write_text('{"step":1,"time":1.0,"loss":0.5}\n')
    write_report([open_run(tmp_path / "theirs.jsonl")], tmp_path / "a.html")
    assert read_report(tmp_path / "a.html")[0].header["name"] == "theirs"


def test_torn_files_give_what_is_whole(folder, tmp_path):
    for file in folder.iterdir():
        content = file.read_bytes()
        if file.suffix == ".jsonl":
            file.write_bytes(b'\xff\n[1]\n{"step":"x"}\n' + content[: len(content) - 7])
    write_report([open_run(folder)], tmp_path / "a.html")
    (run,) = read_report(tmp_path / "a.html")
    assert run.header["step"] == 5
    assert len(run.texts) == 6 * 8 + len(HOSTILE) - 1


def test_more_trajectories_than_there_is_room_for(folder, tmp_path):
    write_report([open_run(folder)], tmp_path / "a.html", max_trajectories=10)
    (run,) = read_report(tmp_path / "a.html")
    assert len(run.texts) == 10
    assert run.index_header["recorded"] == 6 * 8 + len(HOSTILE)


@pytest.mark.parametrize("torn", ["", '{"step'])
def test_what_fits_is_read_once(folder, tmp_path, monkeypatch, torn):
    count = len(list(open_run(folder).rollouts()))
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(torn)
    most = open_run(folder).most_rollouts()
    assert most == count + bool(torn)
    monkeypatch.setattr("rl_metrics.report.writing.choose", lambda *_, **__: pytest.fail("it was read twice"))
    write_report([open_run(folder)], tmp_path / "a.html", max_trajectories=most)
    (run,) = read_report(tmp_path / "a.html")
    assert len(run.texts) == run.index_header["recorded"] == count


def test_the_file_appears_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    output = tmp_path / "a.html"
    output.write_text("the report before")
    monkeypatch.setattr("rl_metrics.report.writing.sync_file", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report([open_run(folder)], output)
    assert output.read_text() == "the report before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "run"]


def test_what_makes_no_report(folder, tmp_path):
    with pytest.raises(SettingsError, match="at least one run"):
        write_report([], tmp_path / "a.html")
    with pytest.raises(SettingsError, match="at least 1; found 0"):
        write_report([open_run(folder)], tmp_path / "a.html", max_trajectories=0)
    assert not (tmp_path / "a.html").exists()


def test_the_command_writes_a_report(folder, tmp_path, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert (folder / "report.html").read_bytes().startswith(page_head("run")[:15])
    assert main(["report", str(folder), "--output", str(tmp_path / "b.html"), "--max-trajectories", "3"]) == 0
    assert len(read_report(tmp_path / "b.html")[0].texts) == 3


def test_the_command_refuses(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "no such folder or file" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2


def test_the_command_overwrites_no_file_of_a_run(folder, capsys):
    before = (folder / "metrics.jsonl").read_bytes()
    assert main(["report", str(folder), "--output", str(folder / "metrics.jsonl")]) == 2
    assert "must end in .html; found 'metrics.jsonl'" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_the_command_refuses_a_folder_as_output(folder, capsys):
    assert main(["report", str(folder), "--output", str(folder)]) == 2
    assert f"{folder} is a folder. Name a file in it, such as {folder}/report.html" in capsys.readouterr().err


def test_the_command_makes_no_folder_of_a_typo(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--output", str(tmp_path / "rnu" / "a.html")]) == 2
    assert f"existing folder; found {tmp_path}/rnu." in capsys.readouterr().err
    assert not (tmp_path / "rnu").exists()


def test_a_file_that_cannot_be_read_stops_nothing(folder, tmp_path):
    (folder / "rollouts.jsonl").unlink()
    (folder / "health.json").unlink(missing_ok=True)
    (folder / "rollouts.jsonl").mkdir()
    (folder / "health.json").mkdir()
    write_report([open_run(folder)], tmp_path / "a.html")
    assert read_report(tmp_path / "a.html")[0].texts == []


def test_the_same_run_gives_the_same_report(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_metrics.report.writing.time.time", lambda: 1.0)
    for name in ("a", "b"):
        write_report([open_run(folder)], tmp_path / f"{name}.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert json.loads(scripts_of((tmp_path / "a.html").read_text())[-3][1])["written"] == 1.0


def test_what_a_killed_writer_left_goes_and_what_another_writes_stays(folder, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, of_others = (tmp_path / f".report.html.{name}.part" for name in (ended.pid, os.getppid()))
    for part in (left, of_others):
        part.write_text("half a page")
    write_report([open_run(folder)], tmp_path / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [of_others.name, "report.html"]
