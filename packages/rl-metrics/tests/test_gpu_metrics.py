"""Metrics of GPUs, and the rules that judge them on invented runs."""

import numpy as np
import pytest
from made_up_metrics import STEPS, from_step, verdict_of

from rl_core.gpus import GpuUse
from rl_metrics.definitions import DEFINITIONS
from rl_metrics.reductions import summarize_gpus


def use(peak, *, busy=0.5):
    return GpuUse(
        max_memory_allocated_gb=peak, max_memory_reserved_gb=peak + 1.0, memory_total_gb=80.0, gpu_utilization=busy
    )


@pytest.mark.parametrize("owner", ["perf", "engine", "teacher"])
def test_an_owners_gpus(owner):
    assert summarize_gpus(owner, []) == {}
    assert summarize_gpus(owner, [use(20.0)]) == {
        f"{owner}/max_memory_allocated_gb": 20.0,
        f"{owner}/max_memory_reserved_gb": 21.0,
        f"{owner}/memory_total_gb": 80.0,
        f"{owner}/gpu_utilization": 0.5,
    }
    several = summarize_gpus(owner, [use(20.0), use(30.0, busy=1.0), use(10.0, busy=None)])
    assert several[f"{owner}/max_memory_allocated_gb"] == 30.0
    assert several[f"{owner}/gpu_utilization"] == 0.75
    assert several[f"{owner}/gpu/1/max_memory_reserved_gb"] == 31.0
    assert f"{owner}/gpu/2/gpu_utilization" not in several
    assert all(name in DEFINITIONS for name in several)


def found(**columns):
    return {one.rule: one.evidence[0].text for one in verdict_of(**columns).findings}


@pytest.mark.parametrize("owner", ["perf", "engine", "teacher"])
def test_a_peak_close_to_the_cards_size(owner):
    total = {f"{owner}__memory_total_gb": np.full(STEPS, 80.0)}
    assert found(**total, **{f"{owner}__max_memory_reserved_gb": np.full(STEPS, 75.0)}) == {}
    said = found(**total, **{f"{owner}__max_memory_reserved_gb": np.full(STEPS, 78.0)})
    assert said == {"gpu_memory_full": f"{owner}/max_memory_reserved_gb is 97.5 % of the card (at most 95 % is safe)"}


@pytest.mark.parametrize("owner", ["perf", "engine", "teacher"])
def test_a_jump_from_20_to_30_gib_is_found(owner):
    name = f"{owner}__max_memory_allocated_gb"
    assert found(**{name: from_step(STEPS - 2, 20.0, 26.0)}) == {}
    assert found(**{name: from_step(STEPS - 2, 2.0, 3.0)}) == {}, "a small model's peak"
    assert list(found(**{name: from_step(STEPS - 2, 20.0, 30.0)})) == ["gpu_memory_jump"]
    assert "memory" in found(**{name: 20.0 + 0.2 * np.arange(STEPS)}), "steady growth"


@pytest.mark.parametrize("owner", ["perf", "engine"])
def test_cards_that_are_busy_less_than_30_percent_of_the_time(owner):
    name = f"{owner}__gpu_utilization"
    assert found(**{name: np.full(STEPS, 0.31)}) == {}
    assert found(**{name: np.full(STEPS, 0.2)}) == {
        "gpu_idle": f"{owner}/gpu_utilization: 20 % of the time (at least 30 % is healthy)"
    }
    assert found(teacher__gpu_utilization=np.full(STEPS, 0.0)) == {}, "teachers wait for groups by design"
