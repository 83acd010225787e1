"""The gateway's counters of a step's sessions, as metrics."""

import pytest

from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions import summarize_gateway

FIRST = {"turns": 3, "roots_first": 1, "roots_system": 2, "sampled_tokens": 60, "overhead_ms": [1.0]}
EVENTS = {"retries": 2, "repeated": 2, "disconnected": 1, "probes": 1, "overridden": 5}
TOKENS = {"sampled_tokens": 40, "untrained_tokens": 15, "abandoned_tokens": 7}
SECOND = {"turns": 5, "roots_first": 1, "forks": 1, **TOKENS, **EVENTS, "overhead_ms": [2.0, 3.0]}


def test_counts_are_summed_or_averaged_over_sessions():
    found = summarize_gateway([FIRST, SECOND])
    assert (found["gateway/turns/mean"], found["gateway/turns/max"], found["gateway/turns/min"]) == (4, 5, 3)
    assert (found["gateway/forks"], found["gateway/roots"], found["gateway/new_root_share"]) == (0.5, 2, 0.25)
    assert (found["gateway/roots/first"], found["gateway/roots/system"]) == (2, 2)
    names = ("sampled_tokens", "untrained_tokens", "abandoned_tokens", "retries", "overridden", "engine_errors")
    assert [found[f"gateway/{name}"] for name in names] == [100, 15, 7, 2, 5, 0]
    assert (found["gateway/overhead_ms/p50"], found["gateway/overhead_ms/p99"]) == (2, pytest.approx(2.98))
    assert all(DEFINITIONS.find(name) is not None for name in found)


@pytest.mark.parametrize("told", [[], [None, "x", 3]])
def test_without_a_gateway_there_is_nothing(told):
    assert summarize_gateway(told) == {}


def test_extras_of_this_name_that_are_not_the_gateways_stop_nothing():
    strange = {"turns": "3", "roots_x": True, "forks": [1], "overhead_ms": [None, "x", True], "sampled_tokens": 2}
    found = summarize_gateway([strange, {"overhead_ms": 5, "roots_b": 1, "roots_a": 1}])
    assert found["gateway/sampled_tokens"] == 2
    assert [name for name in found if "/roots/" in name] == ["gateway/roots/a", "gateway/roots/b"]
    assert not any("overhead" in name or "turns" in name for name in found)
