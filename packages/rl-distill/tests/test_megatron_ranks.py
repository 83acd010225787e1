"""Stacks of a learner's hanging ranks."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions
from rl_core.testing import wait_until
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import LearnerOptions, ParallelOptions

START_S = 120.0
ANSWER_S = 4.0
"""Deadline for a rank that does not answer; the test waits for half of it."""


def test_ranks_say_where_they_are_while_one_waits_for_the_other_in_a_collective(
    two_ranks: Any, tied_policy: Path, make_batch: Any
) -> None:
    ranks = two_ranks.in_layout(ParallelOptions(ranks=2, tensor=2))
    learner = MegatronLearner(tied_policy, LearnerOptions(), ranks=ranks, name="halted")
    scored: list[Any] = []
    scoring = threading.Thread(target=lambda: scored.append(learner.logprobs(make_batch([5, 3]))))
    pid = ranks._group._group[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        scoring.start()

        def is_inside() -> bool:
            waits, stopped = ranks.stacks(deadline_s=ANSWER_S)
            assert "is stopped by a signal" in stopped
            return "pending calls: 'run' for" in waits and "all_reduce" in waits

        wait_until(is_inside, "rank 0 to be in the collective", deadline_s=START_S)
        assert not scored
    finally:
        os.kill(pid, signal.SIGCONT)
        scoring.join(START_S)
    assert len(scored) == 1
    stacks = ranks.stacks(deadline_s=START_S)
    assert stacks
    assert all("pending calls: no call" in text for text in stacks)


def test_ended_ranks_say_so() -> None:
    ranks = LearnerRanks(ParallelOptions(ranks=2), num_threads=1, deadline_s=START_S)
    ranks.close()
    assert ranks.stacks(deadline_s=1) == ["The ranks of the learner were stopped."]


def test_a_rank_in_this_process_says_what_the_process_does() -> None:
    ranks = LearnerRanks(ParallelOptions(ranks=1), cluster=ClusterOptions(kind="inline"))
    try:
        (text,) = ranks.stacks(deadline_s=1)
        assert "in test_a_rank_in_this_process_says_what_the_process_does" in text
    finally:
        ranks.close()
