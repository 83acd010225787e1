"""Lookup of components by name, from this package and from others."""

from importlib.metadata import EntryPoint

import pytest

from rl_core import registry
from rl_core.errors import SettingsError
from rl_core.registry import Registry, nearest_name

GROUP = "rl_core.parts"


def parts_with(monkeypatch, **offered):
    points = [EntryPoint(name, value, GROUP) for name, values in offered.items() for value in values.split()]
    points.append(EntryPoint("elsewhere", "collections:Counter", "another.group"))
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [point for point in points if point.group == group])
    return Registry("part", {"path": "pathlib:Path", "length": len}, group=GROUP)


def test_parts_are_built_in_or_offered_by_other_packages(monkeypatch):
    parts = parts_with(monkeypatch, counter="collections:Counter")
    assert parts.names() == ["counter", "length", "path"]
    assert parts.get("counter").__name__ == "Counter"
    assert parts.get("path").__name__ == "Path"
    assert parts.get("length") is len


def test_an_unknown_name_is_told_the_nearest_all_and_how_to_add_one(monkeypatch):
    parts = parts_with(monkeypatch, counter="collections:Counter")
    with pytest.raises(
        SettingsError,
        match=r"unknown part 'pat'\. Did you mean 'path'\? Known: counter, length, path\. .* group 'rl_core.parts'\.",
    ):
        parts.get("pat")
    with pytest.raises(SettingsError, match=r"unknown thing 'x'\. Known: none\.$"):
        Registry("thing", {}).get("x")


@pytest.mark.parametrize("name", ["path", "counter"])
def test_a_name_that_is_offered_twice_is_refused(monkeypatch, name):
    parts = parts_with(monkeypatch, counter="collections:Counter collections:deque", path="collections:Counter")
    with pytest.raises(SettingsError, match=f"part '{name}' is defined by collections:Counter"):
        parts.get(name)


def test_the_same_entry_point_found_twice_is_one(monkeypatch):
    """This happens if a package is installed and also on the path."""
    parts = parts_with(monkeypatch, counter="collections:Counter collections:Counter")
    assert parts.get("counter").__name__ == "Counter"


@pytest.mark.parametrize("place", ["collections:Absent", "not_there:x"])
def test_what_cannot_be_imported_is_named_with_its_place(monkeypatch, place):
    with pytest.raises(SettingsError, match=f"part 'broken' cannot be loaded from {place}"):
        parts_with(monkeypatch, broken=place).get("broken")


def test_installed_packages_are_read_again_only_where_the_path_has_changed(monkeypatch, tmp_path):
    parts, groups = Registry("part", {"path": "pathlib:Path"}, group=GROUP), []
    monkeypatch.setattr(registry, "entry_points", lambda *, group: groups.append(group) or [])
    for _ in range(3):
        parts.get("path")
    assert groups == [GROUP]
    monkeypatch.syspath_prepend(tmp_path)
    parts.get("path")
    assert groups == [GROUP, GROUP]


def test_nearest_name_is_suggested_if_one_is_near():
    assert nearest_name("exakt", ["exact", "other"]) == " Did you mean 'exact'?"
    assert nearest_name("zzz", ["exact"]) == ""
