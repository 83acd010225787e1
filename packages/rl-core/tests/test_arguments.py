"""Conversion of arguments of public functions, queues and batches, and errors that name the expected type."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rl_core import Batch, InProcessQueue, Prompt, Ragged, RowKey, TaskSpec, Trajectory
from rl_core.errors import DataError, RLError, SettingsError, ShapeError
from rl_core.record_fields import converts_arguments
from rl_core.registry import Registry
from rl_core.testing import make_prompts, make_trajectory

JUDGE = TaskSpec(name="judge", needs=["input_ids"], gives=["reward"])


@converts_arguments
def asked(folder: Path, values: torch.Tensor, *more: int, limit: int | None = None, **rest: int) -> tuple:
    return folder, values, more, limit, rest


def test_arguments_are_converted_as_fields_are():
    folder, values, more, limit, rest = asked("a/b", [1.0, 2.0], 3, 4, limit=np.int64(5), other=6)
    assert (folder, more, limit, rest) == (Path("a/b"), (3, 4), 5, {"other": 6})
    assert (values.dtype, values.tolist()) == (torch.float32, [1.0, 2.0])
    for given, dtype in ((np.zeros(1), torch.float64), ([1], torch.int64), ([True], torch.bool), ((), torch.float32)):
        assert asked("a", given)[1].dtype == dtype
    kept = torch.ones(1, requires_grad=True)
    assert asked(values=kept, folder=Path())[1] is kept


@pytest.mark.parametrize(
    ("values", "named", "error", "said"),
    [
        ((3, [1.0]), {}, DataError, r"^folder of asked must be a path; found 3 \(int\)\.$"),
        (("a", "1"), {}, ShapeError, r"^values of asked must be a Tensor; found '1' \(str\)\.$"),
        (("a", None), {}, ShapeError, "a Tensor; found None"),
        (("a", [[1], [2, 3]]), {}, ShapeError, "a Tensor"),
        (("a", [torch.ones(1, requires_grad=True)]), {}, ShapeError, "a Tensor"),
        (("a", [1.0]), {"limit": "5"}, SettingsError, "limit of asked must be a whole number or None"),
    ],
)
def test_arguments_are_refused_as_fields_are(values, named, error, said):
    with pytest.raises(error, match=said):
        asked(*values, **named)


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        (torch.ones(1, requires_grad=True), r"Pass tensor\.detach\(\)\.$"),
        (torch.ones(1, dtype=torch.bfloat16), r"Pass tensor\.float\(\)\.$"),
        (torch.ones(1, dtype=torch.bfloat16, requires_grad=True), r"Pass tensor\.detach\(\)\.float\(\)\.$"),
        (torch.ones(1, device="meta"), r"Pass tensor\.cpu\(\)\.$"),
    ],
)
def test_a_tensor_that_numpy_cannot_read_says_what_to_call(tensor, advice):
    row, batch = make_trajectory("p", 0), Batch([RowKey("p", 0, 0)], {})
    rows = {"input_ids": [1], "loss_mask": [True], "policy_versions": [0]}
    for make in (
        lambda: Trajectory(prompt_uid=row.prompt_uid, session_index=0, rollout_logprobs=tensor, **rows),
        lambda: batch.with_columns({"reward": tensor}),
        lambda: Ragged(tensor, [0, 1]),
        lambda: Ragged.from_rows([tensor], dtype=np.float32),
    ):
        with pytest.raises(ShapeError, match=advice):
            make()


def test_columns_are_converted_where_no_value_is_lost():
    keys = [RowKey("p", 0, 0), RowKey("p", 1, 0)]
    wide = Ragged(np.array([1.0, 2.0]), [0, 1, 2])
    for reward in ([1, 0], np.array([1.0, 0.0]), torch.tensor([True, False])):
        batch = Batch(keys, {"reward": reward}).with_columns({"values": wide})
        assert (batch["reward"].dtype, batch["values"].dtype) == (np.float32, np.float32)
        assert batch["reward"].tolist() == [1.0, 0.0]
    exact = np.zeros(2, np.float32)
    assert Batch(keys, {"reward": exact})["reward"] is exact


def test_an_ack_converts_as_a_record_does():
    queue = InProcessQueue([JUDGE])
    queue.issue(make_prompts(1), num_sessions=2)
    for session in range(2):
        queue.put("p0", session, iter([make_trajectory("p0", session)]))
    lease = queue.lease("judge", groups=1, deadline_s=0)
    for given, said in (([0.5], "a Mapping"), ({"reward": ["a", "b"]}, "float32"), ({"reward": 1.0}, "2 rows")):
        with pytest.raises(RLError, match=said):
            queue.ack(lease, given)
    queue.ack(lease, {"reward": np.array([0.25, 0.5])})  # float64
    assert queue.ledger()[0].acked_by == {"judge"}


PROMPT, ROW = make_prompts(1)[0], make_trajectory("p0", 0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda q: q.issue(PROMPT, num_sessions=1),
            "prompts must be a list of Prompt; found a single Prompt. Wrap it",
        ),
        (lambda q: q.issue([{"uid": "a"}], num_sessions=1), r"found {'uid': 'a'} \(dict\) at 0. Convert it with Pro"),
        (lambda q: q.issue({"uid": "a"}, num_sessions=1), "prompts must be a list"),
        (lambda q: q.issue("a", num_sessions=1), "prompts must be a list"),
        (lambda q: q.issue(3, num_sessions=1), "prompts must be a list"),
        (lambda q: q.put("p0", 0, ROW), "trajectories must be a list of Trajectory; found a single Trajectory"),
        (lambda q: q.put("p0", 0, [{"input_ids": [1]}]), "Convert it with Trajectory"),
        (lambda q: q.put(PROMPT, 0, [ROW]), "prompt_uid of put must be a string"),
        (lambda q: q.put_batch([ROW]), "batch of put_batch must be a Batch"),
        (lambda q: q.fail(PROMPT, 0, reason="r"), "prompt_uid of fail must be a string"),
        (lambda q: q.drop(["p0"], reason="r"), "prompt_uid of drop must be a string"),
        (lambda q: q.lease([], groups=1), "task of lease must be a string"),
        (lambda q: q.lease("judge", prompts=PROMPT), "prompts of lease must be a sequence, each a string"),
        (lambda q: q.lease("judge", groups=1, deadline_s="1"), "deadline_s of lease must be a number"),
        (lambda q: q.finish("judge", 3), "prompt_uids of finish must be a sequence, each a string"),
        (lambda q: q.ack(q.claim(prompts=1), {}), "lease must be a Lease; found Claim"),
        (lambda q: q.extend(3, lease_s=1), "a Lease or a Claim"),
        (lambda q: q.release(3), "a Lease or a Claim"),
        (lambda _: InProcessQueue(JUDGE), "tasks must be a list of TaskSpec; found a single TaskSpec"),
        (lambda _: InProcessQueue([{"name": "a"}]), "Convert it with TaskSpec"),
        (lambda _: InProcessQueue([JUDGE], options={"capacity_rows": 3}), "options must be a QueueOptions"),
        (lambda _: Batch.from_trajectories(ROW), "found a single Trajectory"),
        (lambda _: Batch.from_trajectories([{}]), "Convert it with"),
        (lambda _: Batch.concat(Batch.from_trajectories([ROW])), "found a single Batch"),
        (lambda _: Ragged.concat([]), "at least one"),
        (lambda _: Ragged.from_rows([1, 2], dtype=np.int32), "a single number"),
    ],
)
def test_one_record_for_several_and_dicts_for_records_are_refused(call, said):
    queue = InProcessQueue([JUDGE])
    queue.issue(iter([Prompt(uid="p0", input_ids=[1])]), num_sessions=1)
    with pytest.raises(RLError, match=said):
        call(queue)
    assert [one.state for one in queue.ledger()] == ["issued"]


def test_containers_say_what_is_in_them():
    batch = Batch.from_trajectories([make_trajectory("p", 0), make_trajectory("p", 1)]).only({"input_ids", "reward"})
    assert repr(batch) == "Batch(2 rows of 1 prompts: input_ids ragged int32, reward float32)"
    assert repr(Batch([], {})) == "Batch(0 rows of 0 prompts: no columns)"
    assert repr(Ragged.from_rows([[1, 2], [3]], dtype=np.int32)) == "Ragged(2 rows of 1 to 2 elements, int32)"
    assert repr(Ragged(np.zeros((0, 4)), [0])) == "Ragged(no rows, float64)"
    assert repr(Ragged(np.zeros((3, 4)), [0, 3])) == "Ragged(1 rows of 3 to 3 elements, float64[4])"
    assert repr(InProcessQueue([JUDGE])) == "InProcessQueue(tasks: judge)"
    assert repr(Registry("loss", {"b": 1, "a": 2})) == "Registry(loss: a, b)"
