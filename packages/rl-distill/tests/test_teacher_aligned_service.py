"""A teacher with other token ids behind the queue: its inputs, stored scores, and trained columns."""

import asyncio

import numpy as np
from distillation_fakes import FakeReplica, make_options, make_prompt, make_trajectory, put

from rl_core import InProcessQueue, TaskSpec
from rl_distill.teacher.aligned import TeacherAligner, TokenPieces
from rl_distill.teacher.protocol import TeacherPlan
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.routing import TeacherRouter
from rl_distill.teacher.score_cache import ScoreCache, ScoreKind
from rl_distill.teacher.service import TeacherService, TeacherServiceOptions, teacher_task

TEXTS = [bytes([ord("a") + index]) for index in range(15)]
STUDENT = TokenPieces(pieces=dict(enumerate(TEXTS)))
TEACHER = TokenPieces(pieces={index + 1: text for index, text in enumerate(TEXTS)})
"""The teacher's ids are the student's plus one; its id 0 has no text."""


def encode(texts):
    return [[1 + octet - ord("a") for octet in text.encode()] for text in texts]


def serve(directory, replica, *, mode, top_k):
    """Score one group of two sessions with a teacher of shifted ids; return the training batch and the report."""
    task = teacher_task(with_aligner=True)
    queue = InProcessQueue([task, TaskSpec(name="train", needs=task.needs | task.gives, order="issue")])
    cache = ScoreCache(directory, ScoreKind(teacher="shifted", dtype="float32", top_k=top_k))

    async def run():
        service = TeacherService(
            [ReplicatedTeacher(TeacherPlan(name="big", top_k=top_k), lambda _: replica)],
            TeacherRouter(make_options({"big": ["default"]})),
            TeacherServiceOptions(vocab_size=15, top_k=top_k, deadline_s=60),
            caches={"big": cache},
            aligners={"big": TeacherAligner(STUDENT, TEACHER, encode, mode=mode)},
        )

        async def work():
            queue.issue([make_prompt("p0")], num_sessions=2)
            await service.issued()
            put(queue, make_trajectory("p0", 0, length=5), make_trajectory("p0", 1, length=7))

        await service.start()
        try:
            await asyncio.wait_for(service.serve_while(queue, work()), 30)
        finally:
            await service.close()
        return service.report.teachers["big"]

    report = asyncio.run(run())
    batch = queue.lease("train", groups=1, deadline_s=60).batch
    queue.close()
    return batch, report


def test_likeliest_tokens_come_back_as_the_students_and_are_stored_as_the_teachers(tmp_path):
    asked = []

    def change(row, scores):
        asked.append(row.input_ids.tolist())
        return scores

    batch, report = serve(tmp_path, FakeReplica(change=change), mode="top_k", top_k=3)
    assert sorted(asked) == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7, 8]]
    assert report.num_trajectories == 2
    # The teacher's top tokens 0, 1 and 2 are: no text, and the student's 0 and 1.
    first = batch.ragged("teacher_ids")[0]
    assert first.tolist() == [[-1] * 4, [-1] * 4, [3, 0, 1, -1], [4, 0, 1, -1], [5, 0, 1, -1]]
    assert batch.ragged("teacher_logprobs")[0][2:].tolist() == [[-0.5, -3, -4, 0]] * 3
    assert batch.ragged("teacher_index")[0].tolist() == [-1, -1, 0, 0, 0]

    idle = FakeReplica()
    again, report = serve(tmp_path, idle, mode="top_k", top_k=3)
    assert idle.scored == []
    assert report.num_stored == 2
    for name in ("teacher_ids", "teacher_logprobs", "teacher_index"):
        assert np.array_equal(again.ragged(name).values, batch.ragged(name).values)


def test_stored_scores_serve_students_of_other_logprobs(tmp_path):
    batch, _ = serve(tmp_path, FakeReplica(logprob=-0.25), mode="sampled", top_k=0)
    assert batch.ragged("teacher_logprobs").values.shape[1] == 1
    assert batch.ragged("teacher_logprobs")[1][:, 0].tolist() == [0, 0, *[-0.25] * 5]
    assert batch.ragged("teacher_ids")[1][:, 0].tolist() == [-1, -1, 3, 4, 5, 6, 7]


def test_what_the_teachers_tokenizer_rewrites_does_not_train_with_it(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "encode", lambda texts: [[1] * len(text) for text in texts])
    batch, report = serve(tmp_path, FakeReplica(), mode="sampled", top_k=0)
    assert report.num_trajectories == 0
    assert (batch.ragged("teacher_index").values == -1).all()
    assert (batch.ragged("teacher_ids").values == -1).all()
