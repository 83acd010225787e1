"""Every name in the guide exists."""

import string

import pytest

from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.health import GUIDE
from rl_metrics.health.checks import KINDS
from rl_metrics.health.rules import is_pattern, pattern_of

RULES = {rule.name: rule for rule in GUIDE}
PROBES = [
    (rule, condition)
    for rule in GUIDE
    for condition in (*rule.conditions, *rule.needs, *rule.unless, *(cause.sign for cause in rule.causes if cause.sign))
]


def test_names_are_given_once():
    assert len(RULES) == len(GUIDE)


def test_every_side_has_rules():
    assert {rule.side for rule in GUIDE} == {"task", "convergence", "stability", "efficiency"}


@pytest.mark.parametrize(("rule", "condition"), PROBES, ids=lambda one: getattr(one, "name", getattr(one, "kind", "")))
def test_a_probe_has_a_kind_thresholds_and_fields(rule, condition):
    assert condition.kind in KINDS
    assert condition.limits_of(rule)
    fields = {field for _, field, _, _ in string.Formatter().parse(condition.says) if field}
    assert fields <= {"metric", "unit", "value", "before", "window", *condition.limits_of(rule)}
    patterns = [names for names in condition.reads if any(map(is_pattern, names))]
    assert len(patterns) <= 1 or (condition.reads[-1] == patterns[-1] and condition.optional_last)


def test_every_metric_that_is_read_is_defined():
    read = [name for _, condition in PROBES for names in condition.reads for name in names]
    assert len(read) > len(PROBES)
    for name in read:
        example = name.replace("perf/mfu/*", "perf/mfu/actor").replace("#", "8")
        example = example.replace("val-core/*/mean", "val-core/x/acc/mean").replace("*", "x_gb")
        assert example in DEFINITIONS, name


def test_causes_name_rules_that_there_are():
    for rule in GUIDE:
        assert any(cause.rule is None and cause.sign is None for cause in rule.causes), rule.name
        for cause in rule.causes:
            assert cause.rule is None or cause.rule in RULES
            assert cause.rule != rule.name


def test_every_threshold_is_used_and_has_a_source():
    for rule in GUIDE:
        named = {
            limit for condition in rule.conditions for limit in condition.limits.values() if isinstance(limit, str)
        }
        thresholds = {threshold.name for threshold in rule.thresholds}
        assert named == thresholds or (
            named <= thresholds and any(not condition.limits for condition in rule.conditions)
        )
        assert rule.thresholds
        assert all(threshold.source and threshold.meaning for threshold in rule.thresholds)


def test_a_pattern_stands_for_names_as_a_whole():
    pattern = pattern_of("val-core/*/mean@#")
    assert pattern.fullmatch("val-core/a/b/acc/mean@16")
    assert not pattern.fullmatch("val-core/a/acc/mean@16/ci_low")
    assert not pattern.fullmatch("val-core/a/acc/mean@x")
