"""The recorded trajectories of a step, and their fields."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rl_core import Batch, Prompt, Trajectory
from rl_core.data.records import ImageSpan, Timings
from rl_core.images import ImageStore, encode_image
from rl_metrics.run_files.rollout_log import read_rollouts
from rl_trainer_parts.reporting.rollout_rows import MAX_EXTRAS, RolloutWriter, bounded, choose_rows, draft_rollouts
from rl_trainer_parts.rollouts.answers import Answer, generation_samples
from rl_trainer_parts.rollouts.setup import problem_id, rollout_extras
from rl_trainer_parts.settings.schema import MetricSettings

PROMPT = Prompt(
    uid="p0-e1",
    input_ids=np.asarray([7, 8], dtype=np.int32),
    data_source="sums",
    ground_truth=[95, {"is_whole": True}],
    columns={},
)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        assert not skip_special_tokens
        return ["".join(chr(96 + int(token)) for token in sequence) for sequence in sequences]


class RunOf:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class SettingsOf:
    """The settings that recording reads."""

    def __init__(self, count: int, max_tokens: int = 1000, seed: int = 0) -> None:
        self.metrics = MetricSettings(log_rollouts=count, log_rollout_tokens=max_tokens)
        self.run = RunOf(seed)


def trajectory(session: int, *, reward: float | None = 1.0, num_tokens: int = 2, took_s: float = 0.5) -> Trajectory:
    length = 2 + num_tokens
    return Trajectory(
        prompt_uid=PROMPT.uid,
        session_index=session,
        input_ids=np.asarray([7, 8, *range(1, num_tokens + 1)], dtype=np.int32),
        loss_mask=np.arange(length) >= 2,
        rollout_logprobs=np.where(np.arange(length) >= 2, -0.25, 0.0).astype(np.float32),
        policy_versions=np.where(np.arange(length) >= 2, 3, -1).astype(np.int32),
        finish_reason="length",
        reward=reward,
        reward_components={"acc": 1.0},
        timings=Timings(generate_s=took_s, tools_s=0.25, reward_s=0.125, preemptions=1),
        extras={"turns": 1},
    )


def batch_of(*trajectories: Trajectory) -> Batch:
    return Batch.from_trajectories(trajectories).with_extras([rollout_extras(PROMPT, one) for one in trajectories])


def rows_of(batch: Batch, **options: Any) -> list[int]:
    return choose_rows(batch, **{"count": 2, "max_tokens": 1000, "seed": 5, **options})


def test_a_row_says_all_of_a_trajectory(tmp_path):
    batch = batch_of(trajectory(4))
    batch = batch.with_columns(dict.fromkeys(("policy_logprobs", "entropy"), batch["rollout_logprobs"]))
    drafts = draft_rollouts(SettingsOf(8), batch, step=3, version=5)  # type: ignore[arg-type]
    writer = RolloutWriter(tmp_path / "rollouts.jsonl", Letters())  # type: ignore[arg-type]
    writer.write(drafts)
    writer.close()
    [row] = read_rollouts(tmp_path / "rollouts.jsonl")
    assert (row.step, row.prompt_uid, row.session, row.output, row.policy_version) == (3, "p0-e1", 4, 0, 5)
    assert (row.source, row.ground_truth, row.reward, row.components) == (
        "sums",
        [95, {"is_whole": True}],
        1.0,
        {"acc": 1.0},
    )
    assert (row.prompt, row.response, row.tokens, row.finish) == ("gh", "ab", ("a", "b"), "length")
    assert row.extras == {"turns": 1}
    assert row.timings == {"generate_s": 0.5, "tools_s": 0.25, "reward_s": 0.125, "preemptions": 1.0}
    assert (row.mask, row.problem) == ((True, True), problem_id(PROMPT.input_ids))
    assert row.columns == {
        "token_ids": (1, 2),
        "versions": (3, 3),
        "rollout_logprobs": (-0.25, -0.25),
        "policy_logprobs": (-0.25, -0.25),
        "entropy": (-0.25, -0.25),
    }


def test_long_extras_are_cut_the_largest_first():
    said = {"answer": "42", "log": "x" * 10_000, "list": [1, {"a": None}], "more": "y" * 9_000}
    kept = bounded(said)
    assert (kept["answer"], kept["list"]) == ("42", [1, {"a": None}])
    assert str(kept["more"]).startswith('"yyy')
    assert str(kept["more"]).endswith("... (9,002 characters)")
    assert "log" not in kept
    assert len(json.dumps(kept)) < MAX_EXTRAS + 100
    assert bounded({"n" * 10_000: 1}) == {}


def test_a_session_of_several_trajectories_is_one_problem_and_its_turns_are_told(tmp_path):
    turns = [["user", 2, 3, 0, ["add"], {}], ["tool", 4, 6, 1, [], {"retry": 7}]]
    one = replace(trajectory(0, num_tokens=4), extras={"turns": turns, "answer": 4})
    mask = np.asarray([False] * 4 + [True] * 2)
    two = replace(one, output_index=1, loss_mask=mask, extras={"turns": "mine"})  # the masked turns are the other's
    batch = batch_of(one, two)
    rows = [row for _, row in draft_rollouts(SettingsOf(8), batch, step=3, version=5)]  # type: ignore[arg-type]
    assert {row.problem for row in rows} == {problem_id(PROMPT.input_ids)}
    assert rows[0].turns == (("user", 2, 3, 0, ["add"], {}), ("tool", 4, 6, 1, [], {"retry": 7}))
    assert [row.extras for row in rows] == [{"answer": 4}, {"turns": "mine"}]
    assert rows[1].turns == ()


def test_a_trajectory_brings_those_of_its_session_along():
    rows = [replace(trajectory(session), output_index=output) for session in range(20) for output in range(3)]
    batch = batch_of(*rows)
    for seed in range(5):
        sessions = [rows[row].session_index for row in rows_of(batch, count=9, seed=seed)]
        assert sorted(Counter(sessions).values()) == [3, 3, 3]


def test_extras_keep_what_the_loop_said():
    assert rollout_extras(PROMPT, trajectory(0))["turns"] == 1


def test_rows_keep_the_images_of_their_trajectories():
    image = ImageSpan(digest="0" * 64, start=0, length=2)
    assert batch_of(replace(trajectory(0), images=(image,)), trajectory(1)).images == ((image,), ())


def test_what_the_queue_takes_is_json():
    assert json.loads(json.dumps(rollout_extras(PROMPT, trajectory(0)))) == rollout_extras(PROMPT, trajectory(0))


def test_the_worst_and_the_slowest_are_always_there():
    rows = [trajectory(index, took_s=9.0 if index == 17 else 1.0, reward=float(index != 11)) for index in range(40)]
    for seed in range(20):
        chosen = rows_of(batch_of(*rows), count=3, seed=seed)
        assert {11, 17} < set(chosen)
        assert chosen == sorted(chosen)


def test_the_draw_is_the_same_for_a_seed_and_another_for_others():
    batch = batch_of(*(trajectory(index) for index in range(40)))
    draws = [tuple(rows_of(batch, count=5, seed=seed)) for seed in range(10)]
    assert draws[3] == tuple(rows_of(batch, count=5, seed=3))
    assert len(set(draws)) == 10


def test_tokens_are_limited_but_one_row_is_always_there():
    batch = batch_of(*(trajectory(index, num_tokens=10) for index in range(5)))
    assert len(rows_of(batch, count=5, max_tokens=29)) == 2
    assert len(rows_of(batch, count=5, max_tokens=1)) == 1


def test_rows_without_rewards_are_drawn_too():
    assert len(rows_of(batch_of(trajectory(0, reward=None), trajectory(1, reward=None)))) == 2


@pytest.mark.parametrize("count", [0, 3])
def test_as_many_as_the_settings_say(count):
    batch = batch_of(*(trajectory(index) for index in range(6)))
    assert len(draft_rollouts(SettingsOf(count), batch, step=1, version=0)) == count  # type: ignore[arg-type]


def test_a_batch_without_extras_is_written_too():
    batch = Batch.from_trajectories([trajectory(0)])
    [(prompt_ids, row)] = draft_rollouts(SettingsOf(1), batch.with_extras([{}]), step=1, version=0)  # type: ignore[arg-type]
    assert (row.source, row.ground_truth, prompt_ids) == ("default", None, (7, 8))


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    writer = RolloutWriter(tmp_path / "file" / "rollouts.jsonl", Letters())  # type: ignore[arg-type]
    drafts = draft_rollouts(SettingsOf(1), batch_of(trajectory(0)), step=1, version=0)  # type: ignore[arg-type]
    with capture_logs() as logs:
        writer.write(drafts)
        writer.write(drafts)
    assert [one["event"] for one in logs] == ["rollout_log_failed"]
    writer.close()


def test_rows_are_drawn_two_of_a_group_at_a_time():
    rows = [
        replace(trajectory(index % 8, reward=float(index)), prompt_uid=f"p{index // 8}-e1", output_index=0)
        for index in range(64)
    ]
    batch = batch_of(*rows)
    for seed in range(20):
        chosen = rows_of(batch, count=9, seed=seed)
        groups = Counter(row // 8 for row in chosen)
        assert {0, 7} <= set(chosen)  # row 0 has the lowest reward, and row 7 the highest of its group
        assert sum(count == 1 for count in groups.values()) <= 1  # only the last row drawn may be alone
    drawn = Counter(row for seed in range(200) for row in rows_of(batch, count=10, seed=seed))
    others = [drawn[row] for row in range(8, 64)]
    assert min(others) > 200 * 8 / 62 * 0.3
    assert max(others) < 200 * 8 / 62 * 2.0


class Seeing:
    """A tokenizer of letters for a model that takes images; its "e" is a placeholder, a special token."""

    def __init__(self, store: ImageStore) -> None:
        self.images = SimpleNamespace(store=store)

    def decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        texts = ["".join(chr(96 + int(token)) for token in sequence) for sequence in sequences]
        return [text.replace("e", "") for text in texts] if skip_special_tokens else texts


def test_texts_name_images_in_place_of_their_tokens(tmp_path):
    store = ImageStore(tmp_path / "images")
    known, missing = store.put(encode_image(np.zeros((56, 84, 3), np.uint8))), "0" * 64
    ids = np.asarray([7, 5, 5, 5, 8, 1, 5, 5, 2, 5], dtype=np.int32)  # a prompt of 5, and sampled: "a" and "be"
    mask = np.asarray([False] * 5 + [True, False, False, True, True])
    spans = ImageSpan(digest=known, start=1, length=3), ImageSpan(digest=missing, start=6, length=2)
    one = Trajectory(
        prompt_uid=PROMPT.uid,
        session_index=0,
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.zeros(len(ids), np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        reward=1.0,
        images=spans,
    )
    tokenizer: Any = Seeing(store)
    batch = Batch.from_trajectories([one])
    batch = batch.with_extras([{**batch.extras[0], **rollout_extras(PROMPT, one)}])
    writer = RolloutWriter(tmp_path / "rollouts.jsonl", tokenizer)
    writer.write(draft_rollouts(SettingsOf(8), batch, step=3, version=5))  # type: ignore[arg-type]
    writer.close()
    [row] = read_rollouts(tmp_path / "rollouts.jsonl")
    assert (row.prompt, row.response) == ("g[image 84x56]h", "a[image]be")
    assert (row.tokens, row.columns["token_ids"]) == (("a", "[image]", "", "b", "e"), (1, 5, 5, 2, 5))
    assert (row.images, row.extras) == (spans, {})
    (sample,) = generation_samples([Answer(prompt=PROMPT, trajectory=one, failure=None, source="test")], tokenizer)
    assert (sample.input, sample.output) == ("g[image 84x56]h", "a[image]b")
    assert sample.images == (known, missing)
