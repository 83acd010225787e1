"""A benchmark's child process: its environment, and the error when it fails."""

import sys
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark

children = load_benchmark("_children")
TALKS = "import sys\nfor line in range(40): print('line', line, file=sys.stderr)\n"
LAST = [f"line {line}" for line in range(10, 40)]


def script(folder: Path, text: str) -> list[str]:
    file = folder / "child.py"
    file.write_text(text)
    return [sys.executable, str(file), "--now"]


def told(error: BaseException) -> tuple[str, str, str, list[str]]:
    reason, command, status, head, *lines = str(error).splitlines()
    assert head == "last lines of its output:"
    return reason, command, status, lines


def test_a_child_that_fails_is_told_with_its_command_its_status_and_its_last_lines(tmp_path: Path) -> None:
    command = script(tmp_path, TALKS + "sys.exit(3)")
    with pytest.raises(children.ChildFailedError) as failed:
        children.run_child(command, tmp_path / "main job.log")
    assert told(failed.value) == ("main job failed", f"command: {' '.join(command)}", "exit status: 3", LAST)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("sys.exit(3)", "start: it ended without an answer"),
        ("print('no JSON'); sys.exit(3)", "start: no JSON"),
        ("print('ready'); input(); sys.exit(3)", "step: it ended without an answer"),
        ("""print('ready'); input(); print('{"error": "ValueError: bad"}'); sys.exit(3)""", "step: ValueError: bad"),
    ],
)
def test_so_is_a_peer(tmp_path: Path, ends: str, reason: str) -> None:
    command = script(tmp_path, TALKS + f"sys.stdout.reconfigure(line_buffering=True); {ends}")
    with (
        pytest.raises(children.ChildFailedError) as failed,
        children.Peer("side", command, tmp_path) as peer,
    ):
        peer.ask({"operation": "step"}, timeout_s=60.0)
    assert told(failed.value) == (reason, f"command: {' '.join(command)}", "exit status: 3", LAST)


def test_a_peer_that_does_not_answer_still_runs(tmp_path: Path) -> None:
    command = script(tmp_path, "import time; print('ready', flush=True); input(); time.sleep(600)")
    peer = children.Peer("side", command, tmp_path)
    with pytest.raises(children.ChildFailedError) as failed:
        peer.ask({"operation": "step"}, timeout_s=0.1)
    peer._process.kill()  # it sleeps and does not read the request to quit
    peer.stop()
    assert told(failed.value)[::2] == ("step: no answer within 0 s", "exit status: none yet")


def test_a_benchmark_whose_child_fails_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = load_benchmark("metrics")
    monkeypatch.setattr(metrics, "TIMING", script(tmp_path, TALKS + "sys.exit(3)")[1])
    assert metrics.main(["--quick"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: main job failed\n")
    assert said.splitlines()[-30:] == LAST


def test_trackers_of_a_child_stay_in_its_folder_whatever_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    found = children.environment(tmp_path)
    assert found["WANDB_MODE"] == "offline"
    assert {found[name] for name in found if name.startswith("WANDB_") and name.endswith("_DIR")} == {str(tmp_path)}
