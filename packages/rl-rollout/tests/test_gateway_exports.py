"""Exports of finished sessions to files and to a queue, each session once."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_model import in_turn
from gateway_site import gateway_site, run
from gateway_talk import said

from rl_core import InProcessQueue, Prompt, TaskSpec
from rl_rollout.cli import main
from rl_rollout.gateway.exports import QueueFeed, export_sessions

USER = {"role": "user", "content": "1+2?"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Store four sessions: a forked one, a failed one, an unfinished one, and a damaged file."""
    folder = tmp_path_factory.mktemp("sessions")

    async def talk():
        async with gateway_site(in_turn("three", "four"), sessions=folder) as gateway:
            forked, failed, _open = gateway.open("p", 0, metadata={"task": 1}), gateway.open("p", 1), gateway.open("q")
            for session in (forked, failed):
                first = await said(gateway, session.key, [USER])
                await said(gateway, session.key, [USER, first, USER])
            await said(gateway, forked.key, [USER, first, {"role": "user", "content": "or"}])
            forked.set_reward(0.5, {"right": 1.0})
            failed.failure = "the sandbox died"
            results.append(await gateway.finish(forked))
            await gateway.finish(failed)

    results = []
    run(talk)
    (folder / "session-00000000000000ff.finished").write_text("mine")
    return folder, results[0]


def test_files_have_each_trained_session_once_and_exactly(kept, tmp_path, capsys):
    folder, result = kept
    assert main(["sessions", "export", str(folder), "--to", str(tmp_path / "out.jsonl")]) == 1
    told = capsys.readouterr().out
    assert "2 trajectories of 1 sessions" in told
    assert "1 failed sessions" in told
    assert "session-00000000000000ff.finished" in told
    counts, unreadable = export_sessions(folder, tmp_path / "out.parquet")
    assert (counts, len(unreadable)) == ({"sessions": 1, "trajectories": 2, "failed": 1}, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "out.parquet"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for line, cells, row in zip(lines, table, result.trajectories, strict=True):
        assert line["input_ids"] == cells["input_ids"] == row.input_ids.tolist()
        assert np.float32(line["rollout_logprobs"]).tolist() == cells["rollout_logprobs"]
        assert cells["rollout_logprobs"] == row.rollout_logprobs.tolist()
        assert line["loss_mask"] == cells["loss_mask"] == row.loss_mask.tolist()
        assert (line["parent"], line["reward"]) == (cells["parent"], cells["reward"]) == (row.parent, 0.5)
        assert line["reward_components"] == json.loads(cells["reward_components"]) == {"right": 1.0}
        assert line["metadata"] == json.loads(cells["metadata"]) == {"task": 1}
    assert [line["parent"] for line in lines] == [None, 0]


def test_the_list_says_what_became_of_each(kept, capsys):
    assert main(["sessions", "list", str(kept[0])]) == 0
    names, *lines = [line.split(maxsplit=8) for line in capsys.readouterr().out.splitlines()]
    assert names[-2:] == ["reward", "failure"]
    assert sorted(line[1] for line in lines) == ["finished", "finished", "finished", "open"]
    assert ["p", "0", "3", "1", "16", "0.5"] in [line[2:] for line in lines]
    assert any(line[2:6] == ["p", "1", "2", "0"] and "the sandbox died" in " ".join(line) for line in lines)
    assert any("is not a readable session" in " ".join(line) for line in lines)
    assert main(["sessions", "list", str(kept[0] / "none")]) == 2


def test_an_export_that_cannot_be_written_leaves_nothing(kept, tmp_path, capsys):
    assert main(["sessions", "export", str(kept[0]), "--to", str(tmp_path / "out.csv")]) == 2
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        export_sessions(kept[0], tmp_path / "out.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_queue_gets_each_session_once_also_after_a_kill_in_between(kept, tmp_path):
    folder, result = kept
    for file in folder.glob("*.finished"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    task = TaskSpec(name="train", needs={"input_ids", "reward"})
    queue = InProcessQueue([task])
    try:
        queue.issue([Prompt(uid="p", input_ids=np.array([1], np.int32))], num_sessions=2)
        feed = QueueFeed(tmp_path, queue)
        feed.put_all()
        assert len(list(tmp_path.glob("*.queued"))) == 2
        for file in tmp_path.glob("*.queued"):
            file.rename(file.with_suffix(".finished"))  # as if killed after the put
        QueueFeed(tmp_path, queue).put_all()
        assert len(list(tmp_path.glob("*.queued"))) == 2
        lease = queue.lease("train", groups=1, deadline_s=30)
        assert [key.output_index for key in lease.batch.keys] == [0, 1]
        assert lease.batch["input_ids"][0].tolist() == result.trajectories[0].input_ids.tolist()
        (entry,) = queue.ledger()
        assert "the sandbox died" in str(entry)
    finally:
        queue.close()
