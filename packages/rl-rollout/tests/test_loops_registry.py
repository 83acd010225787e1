from importlib.metadata import EntryPoint

import pytest

import rl_rollout
from rl_core.errors import SettingsError
from rl_rollout import registry
from rl_rollout.registry import Registry, nearest_name

BUILTIN = {"path": "pathlib:Path"}


def with_entry_points(monkeypatch, *points):
    def entry_points(*, group, name=None):
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return Registry("part", group="rl_rollout.parts", builtin=BUILTIN)


def test_other_packages_add_names_and_cannot_replace_built_in_ones(monkeypatch):
    parts = with_entry_points(
        monkeypatch,
        EntryPoint("counter", "collections:Counter", "rl_rollout.parts"),
        EntryPoint("path", "collections:Counter", "rl_rollout.parts"),
        EntryPoint("other", "collections:Counter", "another.group"),
    )
    assert parts.names() == ["counter", "path"]
    assert parts.load("counter").__name__ == "Counter"
    assert parts.load("path").__name__ == "Path"
    with pytest.raises(SettingsError, match=r"no part is named 'other'; known: counter, path\."):
        parts.load("other")


def test_a_name_that_two_packages_bring_is_refused(monkeypatch):
    parts = with_entry_points(
        monkeypatch,
        EntryPoint("counter", "collections:Counter", "rl_rollout.parts"),
        EntryPoint("counter", "collections:deque", "rl_rollout.parts"),
    )
    with pytest.raises(SettingsError, match="brought by several packages: collections:Counter, collections:deque"):
        parts.load("counter")


def test_nearest_name():
    assert nearest_name("exakt", ["exact", "other"]) == " Did you mean 'exact'?"
    assert nearest_name("zzz", ["exact"]) == ""


def test_public_names():
    assert rl_rollout.__all__ == [
        "AgentLoop",
        "EngineTraits",
        "GenerateRequest",
        "Generation",
        "GroupResult",
        "LoopContext",
        "MathVerify",
        "PromptOptions",
        "PromptSet",
        "PromptSource",
        "PromptTokenizer",
        "RewardFunction",
        "RewardInput",
        "RewardResult",
        "RewardScorer",
        "Rollout",
        "RolloutEngine",
        "SamplingParams",
        "Scored",
        "SessionLoop",
        "SessionResult",
        "SingleTurnLoop",
        "audit_trajectory",
        "load_prompts",
        "quick",
        "require_some_success",
        "resolve_loop",
        "resolve_reward",
    ]
    assert all(hasattr(rl_rollout, name) for name in rl_rollout.__all__)
