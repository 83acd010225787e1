"""The learner's ranks and the teachers report the use of their GPUs, from a fake device."""

import asyncio
from typing import Any, cast

import pytest
from distillation_fakes import FakeReplica
from fake_gpu import USE, fake_gpu

from rl_core.gpus import GpuUse
from rl_distill.learners import Learners
from rl_distill.teacher.engine_teacher import EngineReplica
from rl_distill.teacher.protocol import TeacherPlan
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.routing import TeacherRouter
from rl_distill.teacher.service import TeacherService, TeacherServiceOptions


def test_a_learner_in_this_process_reports_its_gpu() -> None:
    learners = Learners(policy=cast(Any, None), reference=None, critic=None, close=lambda: None)
    assert learners.gpu_use() == []
    with fake_gpu():
        assert learners.gpu_use() == [USE]


def test_a_rank_reports_its_gpu() -> None:
    pytest.importorskip("megatron.core")
    from rl_distill.megatron.host import RankHost
    from rl_distill.megatron.ranks import LearnerRanks

    ranks = LearnerRanks.__new__(LearnerRanks)
    both: Any = lambda method: [[USE], [USE]] if method is RankHost.gpu_use else None
    ranks.call_all = both  # type: ignore[method-assign]
    assert ranks.gpu_use() == [USE, USE]


class ReportingEngine:
    """An engine of a teacher, on one GPU."""

    async def gpu_use(self) -> list[GpuUse]:
        return [USE]


class ReportingReplica(FakeReplica):
    """A replica on such an engine."""

    async def gpu_use(self) -> list[GpuUse]:
        return await EngineReplica(cast(Any, ReportingEngine())).gpu_use()


def test_teachers_report_the_gpus_of_their_serving_replicas() -> None:
    def teacher(name: str, *replicas: FakeReplica) -> ReplicatedTeacher:
        made = iter(replicas)
        return ReplicatedTeacher(TeacherPlan(name=name, num_replicas=len(replicas)), lambda _: next(made))

    async def go() -> tuple[list[GpuUse], list[GpuUse]]:
        large = teacher("large", ReportingReplica(), ReportingReplica())
        silent = teacher("silent", FakeReplica())
        service = TeacherService([large, silent], cast(TeacherRouter, None), cast(TeacherServiceOptions, None))
        before = await service.gpu_use()
        await service.start()
        try:
            return before, await service.gpu_use()
        finally:
            await service.close()

    assert asyncio.run(go()) == ([], [USE, USE])
