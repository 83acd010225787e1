import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointError, SettingsError
from rl_rollout.prompts import PromptOptions, PromptSet, PromptSource
from rl_rollout.prompts.rows import read_jsonl


def prompt_set(folder, size=7):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "answer": i}) + "\n" for i in range(size)))
    return PromptSet(
        [read_jsonl(path)],
        uids=[f"u{i}" for i in range(size)],
        tokens=Ragged.from_rows([[i] for i in range(size)], dtype=np.int32),
        rows=np.array([[0, i] for i in range(size)]),
        options=PromptOptions(max_tokens=4),
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return prompt_set(tmp_path_factory.mktemp("prompts"))


def test_each_epoch_visits_each_prompt_once_in_another_order(prompts):
    source = PromptSource(prompts, seed=1)
    uids = [prompt.uid for prompt in source.next(7 * 5)]
    assert len(set(uids)) == 35
    orders = set()
    for epoch in range(5):
        visited = uids[epoch * 7 : epoch * 7 + 7]
        assert {uid.removesuffix(f"-e{epoch}") for uid in visited} == {f"u{i}" for i in range(7)}
        orders.add(tuple(uid.split("-")[0] for uid in visited))
    assert len(orders) == 5


def test_order_is_pinned_and_follows_the_seed_alone(prompts):
    np.random.seed(3)
    order = [prompt.columns["answer"] for prompt in PromptSource(prompts, seed=1).next(7)]
    assert order == [3, 5, 2, 0, 6, 1, 4]
    assert [p.columns["answer"] for p in PromptSource(prompts, seed=2).next(7)] != order


def test_file_order_when_not_shuffled(prompts):
    source = PromptSource(prompts, seed=1, is_shuffled=False)
    assert [prompt.uid for prompt in source.next(9)][5:] == ["u5-e0", "u6-e0", "u0-e1", "u1-e1"]
    assert source.epoch == 1


@given(first=st.integers(0, 20), chunks=st.lists(st.integers(0, 9), max_size=5))
def test_restored_source_continues_exactly(prompts, first, chunks):
    source = PromptSource(prompts, seed=5)
    source.next(first)
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(prompts, seed=5)
    resumed.restore(state)
    assert resumed.state() == source.state()
    expected = [prompt.uid for prompt in source.next(sum(chunks))]
    assert [prompt.uid for size in chunks for prompt in resumed.next(size)] == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fingerprint": "other"}, SettingsError, "fingerprint = 'other'; this run has"),
        ({"seed": 6}, SettingsError, "seed = 6; this run has 5"),
        ({"is_shuffled": False}, SettingsError, "is_shuffled = False"),
        ({"position": 7}, CheckpointError, "position 7; expected whole numbers"),
        ({"epoch": "0"}, CheckpointError, "epoch '0'"),
        ({"extra": 0}, CheckpointError, "must have"),
    ],
)
def test_states_of_other_runs_are_refused(prompts, change, error, message):
    source = PromptSource(prompts, seed=5)
    source.next(3)
    before = source.state()
    with pytest.raises(error, match=message):
        source.restore({**before, **change})
    assert source.state() == before


def test_seed_must_not_be_negative(prompts):
    with pytest.raises(SettingsError, match="at least 0; found -1"):
        PromptSource(prompts, seed=-1)
