"""The learner host and its ranks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import RoleDiedError
from rl_distill.learner_host import LearnerHost, LearnerHostOptions, rank_reports
from rl_distill.learners import Learners

SPEAKS = "engine[0] is serving in pid 7; pending calls: generate.\nits event loop is responsive\nthread MainThread ..."
SILENT = (
    "rank[1] is serving in pid 8; pending calls: train.\nIt has not answered since 12:00:00, 4.0 s: C code holds its "
    "interpreter, it is stopped, or it gets no CPU time."
)


def test_a_rank_that_did_not_answer_is_told_apart():
    reports = rank_reports([SPEAKS, SILENT, "rank[2] ...\nIts stacks are not known: DeadlineError: late"], asked_s=8.0)
    assert [report.name for report in reports] == ["rank[0]", "rank[1]", "rank[2]"]
    assert [report.is_answering for report in reports] == [True, False, False]
    assert [report.since_s for report in reports] == [0.0, 8.0, 8.0]


@pytest.mark.parametrize(("ends", "error"), [(True, SystemExit), (False, RoleDiedError)])
def test_a_dead_rank_that_nobody_calls_is_detected_by_a_look(ends: bool, error: type[BaseException], tmp_path: Path):
    """With `ends_with_ranks` the host exits; the trainer then restarts it and all ranks."""
    nothing: Any = None

    def look() -> None:
        raise RoleDiedError("learner[1] was killed.", role="learner", rank=1)

    async def work() -> None:
        options = LearnerHostOptions(ends_with_ranks=ends)
        host = LearnerHost(nothing, [], checkpoints=tmp_path, keep=1, options=options)
        host.learners = Learners(policy=nothing, reference=None, critic=None, close=lambda: None, check_alive=look)
        with pytest.raises(error, match=r"learner\[1\] was killed"):
            await host.check_alive()
        await host.close()

    asyncio.run(work())


def test_the_report_says_what_the_host_does(tmp_path: Path):
    nothing: Any = None
    host = LearnerHost(nothing, [], checkpoints=tmp_path, keep=1, options=LearnerHostOptions())

    def doing() -> str:
        return asyncio.run(host.report()).doing

    assert doing() == "waits for the order to start, for 0 s"
    with host.doing("trains step 3"):
        assert doing() == "trains step 3, for 0 s"
    assert doing() == "waits for the next order, for 0 s"
