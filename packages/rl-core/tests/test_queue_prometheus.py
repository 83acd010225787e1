"""A queue's statistics in Prometheus format, read back by Prometheus' own parser."""

import sys

import pytest

from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.queue.prometheus import prometheus_text
from rl_core.testing import FakeClock, make_prompts, make_trajectory

parser = pytest.importorskip("prometheus_client.parser")

TRAIN = TaskSpec(name="train", needs=frozenset({"reward"}))
HOSTILE = 'no "room"\\\nrl_queue_rows 7\x1b[2J'


def busy_queue() -> InProcessQueue:
    """Return a queue with a value for every metric."""
    clock = FakeClock()
    queue = InProcessQueue([TRAIN], options=QueueOptions(capacity_rows=100), clock=clock)
    queue.issue(make_prompts(6), num_sessions=1)
    for uid in ("p0", "p1", "p2"):
        queue.put(uid, 0, [make_trajectory(uid, 0)])
    queue.ack(queue.lease("train", groups=1))
    queue.lease("train", groups=1, lease_s=1.0)
    clock.advance(2.0)
    queue.lease("train", groups=1)
    queue.claim(prompts=1)
    queue.drop("p5", reason=HOSTILE)
    clock.advance(3.0)
    return queue


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_values_are_there_under_their_names():
    found = samples_of(prometheus_text(busy_queue().stats()))
    assert found["rl_queue_groups", "state=issued"] == 2
    assert found["rl_queue_groups", "state=settled"] == 2
    assert found["rl_queue_groups", "state=done"] == 1
    assert found["rl_queue_rows", "state=settled"] == found["rl_queue_held_rows",] == 2
    assert found["rl_queue_leased_rows",] == 1
    assert found["rl_queue_leases",] == found["rl_queue_claims",] == 1
    assert found["rl_queue_oldest_lease_seconds",] == 3.0
    assert found["rl_queue_leases_expired_total",] == 1
    assert found["rl_queue_waiting", "kind=put"] == 0
    assert found["rl_queue_waited_seconds_total", "kind=lease"] == 0
    assert found["rl_queue_acks_total", "task=train"] == 1


def test_no_statistic_is_left_out():
    stats = {f"{key}": 1000.5 + number for number, key in enumerate(busy_queue().stats())}
    values = list(samples_of(prometheus_text(stats)).values())
    assert sorted(value for value in values if value) == sorted(stats.values())


def test_reasons_are_escaped_and_come_back_as_they_were():
    text = prometheus_text(busy_queue().stats())
    assert not any(line.startswith("rl_queue_rows 7") for line in text.splitlines())
    assert samples_of(text)["rl_queue_drops_total", f"reason={HOSTILE}"] == 1
    assert r'reason="\\ud800"' in prometheus_text({"drops/\ud800": 1.0})


def test_states_without_groups_are_zero_so_that_no_series_goes_away():
    found = samples_of(prometheus_text({}))
    assert {key[1]: value for key, value in found.items() if key[0] == "rl_queue_groups"} == {
        "state=issued": 0,
        "state=settled": 0,
        "state=done": 0,
        "state=dropped": 0,
    }


def test_labels_are_on_every_line():
    text = prometheus_text(busy_queue().stats(), labels={"queue": 'roll"outs'})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all(r'queue="roll\"outs"' in line for line in lines)


@pytest.mark.parametrize("name", ["state", "reason", "a-b", "9a", "", "__name__", 'a="1",b'])
def test_impossible_labels_are_refused(name):
    with pytest.raises(SettingsError, match="a label name must"):
        prometheus_text({}, labels={name: "x"})


@pytest.mark.parametrize("key", ["surprise", "rows/", "groups", "leases/now"])
def test_unknown_statistics_are_refused(key):
    with pytest.raises(DataError, match="unknown statistic"):
        prometheus_text({key: 1.0})


def test_the_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"rl-core\[prometheus\]"):
        prometheus_text({})
