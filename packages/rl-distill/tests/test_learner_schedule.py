"""Warm-up and decay."""

import pytest

from rl_distill.options import LearnerOptions
from rl_distill.stepping import learning_rate_at


def test_rate_is_constant_without_schedule():
    options = LearnerOptions(learning_rate=0.5)

    assert [learning_rate_at(step, options) for step in (1, 2, 1000)] == [0.5, 0.5, 0.5]


def test_learning_rate_rises_in_the_warmup_then_decays():
    options = LearnerOptions(learning_rate=1.0, warmup_steps=2, decay_steps=6)

    rates = [learning_rate_at(step, options) for step in range(1, 9)]

    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_decay_without_warmup_starts_at_the_peak():
    options = LearnerOptions(learning_rate=1.0, decay_steps=4)

    assert [learning_rate_at(step, options) for step in range(1, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_decay_ends_at_the_lowest_rate():
    options = LearnerOptions(learning_rate=1.0, warmup_steps=1, decay_steps=5, decay="cosine", min_learning_rate=0.1)

    rates = [learning_rate_at(step, options) for step in range(1, 8)]

    assert rates == pytest.approx([1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1], abs=1e-6)
