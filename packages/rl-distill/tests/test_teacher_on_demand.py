"""A teacher with stored scores starts only when a score is missing."""

import asyncio
import json

import numpy as np
import pytest
from distillation_fakes import VOCAB_SIZE, FakeReplica, make_options, make_prompt, make_queue, make_trajectory, put

from rl_core.data.row_keys import RowKey
from rl_core.errors import SettingsError
from rl_distill.teacher.model_folder import model_traits
from rl_distill.teacher.protocol import TeacherPlan, TeacherTraits
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.routing import TeacherRouter
from rl_distill.teacher.score_cache import ScoreCache, ScoreKind
from rl_distill.teacher.scores import TeacherRow
from rl_distill.teacher.service import TeacherService, TeacherServiceOptions

TRAITS = TeacherTraits(vocab_size=VOCAB_SIZE, hidden_size=4, max_tokens=50)
ROW = TeacherRow(key=RowKey("p", 0, 0), input_ids=np.arange(5, dtype=np.int32), loss_mask=np.arange(5) > 1)


def made(replica):
    return ReplicatedTeacher(TeacherPlan(name="big", top_k=2), lambda _: replica, traits=TRAITS)


def test_nothing_starts_before_the_first_score():
    replica = FakeReplica(max_tokens=70, vocab_size=VOCAB_SIZE + 1)

    async def run():
        teacher = made(replica)
        await teacher.start()
        await teacher.wake()
        assert (teacher.vocab_size, teacher.max_tokens, teacher.hidden_size) == (VOCAB_SIZE, 50, 4)
        assert not teacher.is_started
        await teacher.sleep()
        assert replica.events == []
        (scores,) = await teacher.score([ROW])
        assert scores.logprobs.shape == (5, 3)
        assert replica.events == ["start"]
        assert (teacher.vocab_size, teacher.max_tokens, teacher.hidden_size) == (VOCAB_SIZE + 1, 70, None)
        await teacher.close()

    asyncio.run(run())
    assert replica.events == ["start", "close"]


def test_it_sleeps_between_steps_and_is_woken_when_something_is_missing():
    replica = FakeReplica()

    async def run():
        teacher = made(replica)
        await teacher.score([ROW])
        for _ in range(2):
            await teacher.sleep()
            await teacher.wake()
        assert replica.events == ["start", "sleep"]
        await asyncio.gather(*(teacher.score([ROW]) for _ in range(3)))
        assert replica.events == ["start", "sleep", "wake"]
        await teacher.close()

    asyncio.run(run())


def test_a_start_that_fails_is_the_error_of_who_asked():
    replica = FakeReplica(start_error=RuntimeError("no memory"))

    async def run():
        teacher = made(replica)
        with pytest.raises(RuntimeError, match="no memory"):
            await teacher.score([ROW])
        assert not teacher.is_started
        await teacher.close()

    asyncio.run(run())


def run_service(directory, replica):
    """Serve one step of four trajectories; return the columns of the next task."""
    queue = make_queue()
    options = make_options({"big": ["math"]}, loss="forward_kl", top_k=2)
    cache = ScoreCache(directory, ScoreKind(teacher="abc", dtype="float32", top_k=2))

    async def run():
        service = TeacherService(
            [made(replica)],
            TeacherRouter(options),
            TeacherServiceOptions(vocab_size=VOCAB_SIZE, top_k=2, deadline_s=60),
            caches={"big": cache},
        )

        async def work():
            queue.issue([make_prompt("p0", "math"), make_prompt("p1", "math")], num_sessions=2)
            await service.issued()
            put(queue, *(make_trajectory(uid, n, length=5 + n) for uid in ("p0", "p1") for n in range(2)))

        await service.start()
        try:
            await asyncio.wait_for(service.serve_while(queue, work()), 30)
        finally:
            await service.close()
        return service.report.teachers["big"]

    report = asyncio.run(run())
    cache.flush()
    batch = queue.lease("train", groups=2, deadline_s=60).batch
    queue.close()
    return report, batch


def test_a_second_run_takes_its_scores_from_the_cache_and_starts_no_teacher(tmp_path):
    first, second = FakeReplica(), FakeReplica()
    report, expected = run_service(tmp_path, first)
    assert "start" in first.events
    assert report.num_trajectories > 0
    report, found = run_service(tmp_path, second)
    assert second.events == ["close"]
    assert (report.num_trajectories, report.num_stored) == (0, 4)
    for name in ("teacher_logprobs", "teacher_ids", "teacher_index"):
        assert np.array_equal(found.ragged(name).values, expected.ragged(name).values)
    assert (found.ragged("teacher_index").values[found.ragged("loss_mask").values] == 0).all()


def test_traits_are_read_from_a_models_configuration(tmp_path):
    config = {"vocab_size": 32, "hidden_size": 16, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_traits(tmp_path) == TeacherTraits(vocab_size=32, hidden_size=16, max_tokens=64)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"vocab_size": 1, "hidden_size": 2}', '{"vocab_size": true}', "[" * 99_999]
)
def test_a_configuration_that_says_nothing_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match="must have vocab_size, hidden_size, max_position_embeddings"):
        model_traits(tmp_path)
