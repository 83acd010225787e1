import pytest
import structlog

from rl_core.errors import DataError
from rl_metrics.definitions.definition import Band, Metric, MetricTable


def metric(name, **fields):
    return Metric(**({"name": name, "unit": "1", "reduction": "mean", "meaning": "A test."} | fields))


TABLE = MetricTable(
    [
        metric("actor/entropy", unit="nats"),
        metric("val-core/{source}/{variable}/mean@{n}", weighted_by="prompt"),
        metric("reward/{component}/max", reduction="max"),
    ]
)


def test_a_plain_name_is_found():
    assert TABLE.lookup("actor/entropy").unit == "nats"
    assert "actor/entropy" in TABLE
    assert len(TABLE) == 3


def test_a_component_of_a_part_is_defined():
    assert TABLE.lookup("reward/format/missing_tag/max").reduction == "max"


@pytest.mark.parametrize(
    "name", ["val-core/gsm8k/acc/mean@8", "val-core/openai/gsm8k/reward/mean@16", "val-core/a b/acc/mean@1"]
)
def test_a_family_fits_sources_with_slashes_and_fills_in_the_name(name):
    found = TABLE.lookup(name)
    assert found.name == name
    assert found.reduced == "mean over prompts"


@pytest.mark.parametrize(
    "name",
    [
        "val-core/gsm8k/acc/mean@x",
        "val-core/gsm8k/mean@8",
        "val-core/gsm8k/acc/mean@8/extra",
        "reward//max",
        "actor/entropyy",
        "xactor/entropy",
    ],
)
def test_a_family_fits_nothing_else(name):
    assert TABLE.find(name) is None
    assert name not in TABLE


def test_dots_in_names_are_literal():
    table = MetricTable([metric("a.b/{x}/c.d")])
    assert "a.b/x/c.d" in table
    assert "aXb/x/c.d" not in table
    assert "a.b/x/cXd" not in table


def test_the_reduction_in_words():
    assert metric("a", reduction="histogram", weighted_by="token").reduced == "histogram over tokens"
    assert metric("a", weighted_by="group").reduced == "mean over groups"
    assert metric("a", reduction="sum", weighted_by="token").reduced == "sum"


def test_a_plain_name_wins_over_a_family():
    table = MetricTable([metric("a/{x}", unit="family"), metric("a/b", unit="plain")])
    assert table.lookup("a/b").unit == "plain"
    assert table.lookup("a/c").unit == "family"


def test_undefined_is_an_error_with_the_nearest_name():
    with pytest.raises(DataError, match=r"'actor/entropi' is not defined; the nearest is 'actor/entropy'"):
        TABLE.resolve("actor/entropi", strict=True)


def test_undefined_warns_once_when_not_strict():
    table = MetricTable([metric("actor/entropy")])
    with structlog.testing.capture_logs() as logs:
        first = table.resolve("actor/entropi", strict=False)
        table.resolve("actor/entropi", strict=False)
        table.resolve("zzz", strict=False)
    assert first.reduction == "mean"
    assert [(entry["event"], entry["metric"]) for entry in logs] == [
        ("undefined_metric", "actor/entropi"),
        ("undefined_metric", "zzz"),
    ]
    assert logs[0]["hint"] == "the nearest is 'actor/entropy'"


def test_a_name_defined_twice_is_refused():
    with pytest.raises(DataError, match="'a' is defined twice"):
        MetricTable([metric("a"), metric("a")])


def test_a_table_can_be_extended_and_stays_as_it_was():
    longer = TABLE.extended([metric("mine/thing", reduction="sum")])
    assert longer.lookup("mine/thing").reduced == "sum"
    assert "mine/thing" not in TABLE


@pytest.mark.parametrize(
    ("low", "high", "value", "is_inside"),
    [
        (0.0, 1.0, 0.0, True),
        (0.0, 1.0, 1.0, True),
        (0.0, 1.0, 1.1, False),
        (None, 1.0, -5.0, True),
        (0.5, None, 0.4, False),
        (None, None, float("nan"), False),
        (0.0, 1.0, float("nan"), False),
    ],
)
def test_bands_include_their_ends_and_no_nan(low, high, value, is_inside):
    assert Band(low=low, high=high, source="test").contains(value) is is_inside


def test_bands_in_words():
    assert str(Band(low=0.0, high=0.5, source="t")) == "0 to 0.5"
    assert str(Band(high=0.03, source="t")) == "at most 0.03"
    assert str(Band(low=0.5, source="t")) == "at least 0.5"
    assert str(Band(low=1.0, high=1.0, source="t")) == "1"
