"""What other stacks get of finished sessions: files and a queue, each session once."""

import asyncio
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_model import in_turn, make_tokenizer
from gateway_site import gateway_site, run
from gateway_talk import said

from rl_core import InProcessQueue, Prompt, TaskSpec
from rl_rollout.cli import main
from rl_rollout.gateway.exports import QueueFeed, export_sessions

USER = {"role": "user", "content": "1+2?"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Four sessions: one that forked, one that failed, one that nobody finished, and a damaged file."""
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
    assert "1 sessions that failed" in told
    assert "session-00000000000000ff.finished" in told
    decode = lambda rows: make_tokenizer().decode(rows, skip_special_tokens=False)
    done = export_sessions(folder, tmp_path / "out.parquet", decode=decode)
    assert (done.sessions, done.trajectories, done.failed, len(done.unreadable)) == (1, 2, 1, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "out.parquet"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for line, cells, row in zip(lines, table, result.trajectories, strict=True):
        assert line["input_ids"] == cells["input_ids"] == row.input_ids.tolist()
        assert np.float32(line["rollout_logprobs"]).tolist() == cells["rollout_logprobs"]
        assert cells["rollout_logprobs"] == row.rollout_logprobs.tolist()
        assert line["loss_mask"] == cells["loss_mask"] == row.loss_mask.tolist()
        assert (line["parent"], line["reward"]) == (cells["parent"], cells["reward"]) == (row.parent, 0.5)
        assert line["reward_components"] == dict(cells["reward_components"]) == {"right": 1.0}
        assert line["metadata"] == json.loads(cells["metadata"]) == {"task": 1}
    assert [line["parent"] for line in lines] == [None, 0]
    assert table[0]["completion"].startswith("three<|im_end|>\n<|im_start|>user\n")
    assert table[1]["completion"] == "four<|im_end|>"


def test_the_list_says_what_became_of_each(kept, capsys):
    assert main(["sessions", "list", str(kept[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sessions"]
    by_state = sorted((one["state"], one.get("failure") or "", one.get("turns")) for one in found)
    assert [state[0] for state in by_state] == ["finished", "finished", "finished", "open"]
    assert by_state[0][2] == 3
    assert "is no session" in by_state[1][1] or "is no session" in by_state[2][1]
    assert any(one.get("failure") == "the sandbox died" for one in found)
    assert main(["sessions", "list", str(kept[0])]) == 0
    assert "the sandbox died" in capsys.readouterr().out
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
        asyncio.run(feed.put_all())
        assert len(list(tmp_path.glob("*.queued"))) == 2
        for file in tmp_path.glob("*.queued"):
            file.rename(file.with_suffix(".finished"))  # it was killed after the put
        asyncio.run(QueueFeed(tmp_path, queue).put_all())
        assert len(list(tmp_path.glob("*.queued"))) == 2
        lease = queue.lease("train", groups=1, deadline_s=30)
        assert [key.output_index for key in lease.batch.keys] == [0, 1]
        assert lease.batch["input_ids"][0].tolist() == result.trajectories[0].input_ids.tolist()
        (entry,) = queue.ledger()
        assert "the sandbox died" in str(entry)
    finally:
        queue.close()
