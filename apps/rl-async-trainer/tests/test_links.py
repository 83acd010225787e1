"""The controller's link to the learner: calls arrive as they were made, unless a rollback has voided them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async_trainer.controller.links import LearnerLink
from rl_core.cluster import ClusterOptions, RoleRestartedError, RoleSpec, open_cluster


class Recorder:
    """A learner that records what it was asked to save."""

    saved: list[tuple[int, Any, Sequence[int]]]

    def __init__(self) -> None:
        Recorder.saved = []

    async def start(self, checkpoint: Path | None) -> int:
        return 0 if checkpoint is None else 1

    async def save(self, step: int, state: Any, also_keep: Sequence[int] = ()) -> None:
        self.saved.append((step, state, also_keep))


def test_arguments_arrive_by_keyword_and_a_voided_call_is_not_sent() -> None:
    async def nothing(_: object) -> None:
        return

    async def work() -> None:
        spec = RoleSpec(name="learner", factory=f"{__name__}:Recorder")
        role = await open_cluster(ClusterOptions(kind="inline")).start(spec, deadline_s=60)
        link = LearnerLink(role, find_checkpoint=lambda: Path(), on_lost=nothing, on_restored=nothing)
        await link.start()
        assert link.num_parameters == 1
        await link.now.save(3, {"a": 1}, also_keep=[2])
        course = link.course()
        link.went_back()
        with pytest.raises(RoleRestartedError, match="rolled back"):
            await link.when(course).save(4, {})
        await role.close()

    asyncio.run(work())
    assert Recorder.saved == [(3, {"a": 1}, [2])]
