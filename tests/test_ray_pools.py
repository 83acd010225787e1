"""Freeing the pools of an ended role on Ray while other processes change Ray's table."""

import logging

import pytest

from rl_core.cluster.ray import pools as ray_pools


class Groups:
    """Placement groups by name, as in Ray's table; a group without a state vanishes after the table is read."""

    def __init__(self, **states):
        self.states = states
        self.removed = []
        self.refusal = None

    def table(self):
        return {name: {"name": f"of {name}", "state": state or "CREATED"} for name, state in self.states.items()}

    def find(self, name):
        if self.states[name.removeprefix("of ")] is None:
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return name

    def remove(self, name):
        if self.refusal is not None:
            raise self.refusal
        self.removed.append(name)


@pytest.fixture
def groups(monkeypatch):
    groups = Groups(mark_1=None, other="CREATED", mark_2="CREATED", mark_3="REMOVED", mark_4="PENDING")
    monkeypatch.setattr(ray_pools.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_pools, "placement_group_table", groups.table)
    monkeypatch.setattr(ray_pools, "get_placement_group", groups.find)
    monkeypatch.setattr(ray_pools, "remove_placement_group", groups.remove)
    return groups


def test_a_pool_that_vanished_keeps_no_other_reserved(groups, caplog):
    ray_pools.free_pools_of("mark")
    assert groups.removed == ["of mark_2", "of mark_4"]
    assert caplog.messages == []


def test_what_ray_refuses_is_warned_of(groups, caplog):
    groups.refusal = RuntimeError("no connection")
    with caplog.at_level(logging.WARNING):
        ray_pools.free_pools_of("mark")
    assert caplog.messages == ["pools_not_freed mark=mark error=RuntimeError: no connection"]
