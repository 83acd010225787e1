"""Records convert their arguments to the annotated types, or refuse them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import pytest
from annotated_types import Gt, Interval, Le, Len, MinLen, MultipleOf
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_core import Batch, Prompt, QueueOptions, Ragged, ResourcePool, RowKey, TaskSpec, Trajectory
from rl_core.data import Timings
from rl_core.errors import DataError, RLError, SettingsError, ShapeError
from rl_core.record_fields import (
    Axes,
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    record,
    record_tuple,
    settings_record,
)
from rl_core.testing import make_trajectory


class Speaks(Protocol):
    def say(self) -> str: ...


@record
class Record:
    name: str = "r"
    count: int = 0
    share: float = 0.5
    is_on: bool = False
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    folder: Path = Path()
    words: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    pair: tuple[int, str] = (0, "")
    listed: Sequence[float] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    inner: "Record | None" = None
    anything: Any = None
    call: Callable[[], None] | None = None
    speaks: Speaks | None = None
    ids: Annotated[NDArray[np.int32], Axes("T")] = field(default_factory=lambda: np.zeros(2, np.int32))
    mask: Annotated[NDArray[np.bool_] | None, Axes("T")] = None


ARRAY = np.array([1, 2], np.int32)


def test_a_field_that_is_not_an_argument_is_set_after_the_check():
    @settings_record
    class Doubled:
        count: PositiveInt
        twice: int = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "twice", 2 * self.count)

    assert Doubled(count=2).twice == 4


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("count", np.int64(3), 3),
        ("count", 3.0, 3),
        ("count", np.array(3), 3),
        ("share", 1, 1.0),
        ("share", True, 1.0),
        ("share", np.float32(0.5), 0.5),
        ("is_on", np.True_, True),
        ("limit", np.int32(4), 4),
        ("folder", "a/b", Path("a/b")),
        ("words", ["x", "y"], ("x", "y")),
        ("names", ["x", "y"], frozenset("xy")),
        ("names", {"x"}, frozenset("x")),
        ("pair", [1, "x"], (1, "x")),
        ("listed", np.array([1, 2]), (1.0, 2.0)),
        ("parts", {"a": np.float32(0.5), "b": 1}, {"a": 0.5, "b": 1.0}),
    ],
)
def test_what_loses_nothing_is_converted(name, given, held):
    found = getattr(Record(**{name: given}), name)
    assert found == held
    assert type(found) is type(held)


@pytest.mark.parametrize("given", [[1, 2], (1, 2), np.array([1, 2]), np.array([1.0, 2.0]), np.array([1, 2], np.uint8)])
def test_arrays_are_converted_where_every_value_stays(given):
    found = Record(ids=given)
    assert found.ids.dtype == np.int32
    assert found.ids.tolist() == [1, 2]
    assert Record(ids=[], mask=[]).ids.dtype == np.int32
    assert Record(mask=[0, 1]).mask.tolist() == [False, True]


def test_what_fits_is_kept_as_it_is():
    words, parts = ("a",), {"a": 1.0}
    made = Record(ids=ARRAY, words=words, parts=parts, anything=words)
    assert (made.ids is ARRAY, made.words is words, made.parts is parts) == (True, True, True)
    assert replace(made, count=1).ids is ARRAY


@pytest.mark.parametrize(
    ("name", "given", "error", "said"),
    [
        ("name", 3, DataError, r"^name of Record must be a string; found 3 \(int\)\.$"),
        ("count", "3", DataError, r"^count of Record\(name='r'\) must be a whole number; found '3' \(str\)\.$"),
        ("count", True, DataError, "a whole number"),
        ("count", 1.5, DataError, "a whole number"),
        ("count", float("inf"), DataError, "a whole number"),
        ("share", "0.5", DataError, "a number"),
        ("share", None, DataError, "a number"),
        ("is_on", 1, DataError, "True or False"),
        ("kind", "c", DataError, "one of 'a', 'b'; found 'c'"),
        ("kind", [], DataError, "one of 'a', 'b'"),
        ("limit", "x", DataError, "a whole number or None"),
        ("folder", 3, DataError, "a path"),
        ("words", "xy", DataError, r"a tuple, each a string; found 'xy' \(str\)"),
        ("words", ["x", 1], DataError, r"a tuple, each a string; found \['x', 1\] \(list\), with int at 1\.$"),
        ("names", "xy", DataError, "a set, each a string"),
        ("pair", (1,), DataError, "a tuple, a whole number, a string"),
        ("parts", [("a", 1.0)], DataError, "a mapping, a string to a number"),
        ("parts", {"a": "x"}, DataError, r"a mapping, .* \(dict\), with str at 'a'\.$"),
        ("inner", 3, DataError, "a Record or None"),
        (
            "ids",
            [1.5, 2],
            ShapeError,
            r"must be \[T\] int32; found \[1.5, 2\] \(list\), with values that do not fit into int32",
        ),
        (
            "ids",
            np.array([1, 2**40]),
            ShapeError,
            r"of shape \[2\], with values that do not fit into int32\.",
        ),
        ("ids", [[1, 2]], ShapeError, r"\[T\] int32"),
        ("ids", [[1], [2, 3]], ShapeError, r"\[T\] int32"),
        ("ids", "12", ShapeError, r"\[T\] int32"),
        ("ids", [True, False], ShapeError, r"\[T\] int32"),
        ("ids", None, ShapeError, r"\[T\] int32"),
        ("mask", [0, 2], ShapeError, r"\[T\] bool"),
        (
            "mask",
            [True],
            ShapeError,
            r"^mask of Record\(.*\) must have shape \[T\] with T = 2, as ids has; found \[1\]\.$",
        ),
    ],
)
def test_what_would_change_is_refused_where_it_is_made(name, given, error, said):
    with pytest.raises(error, match=said):
        Record(**{name: given})
    with pytest.raises(error, match=said):
        replace(Record(), **{name: given})


def test_options_are_refused_as_settings_and_own_checks_come_after():
    @settings_record
    class Options:
        limit: int

        def __post_init__(self):
            if self.limit < 1:
                raise SettingsError("limit must be at least 1.")

    assert Options(limit=np.int64(2)).limit == 2
    with pytest.raises(SettingsError, match="a whole number"):
        Options(limit="2")
    with pytest.raises(SettingsError, match="at least 1"):
        Options(limit=np.int64(0))


@settings_record
class Bounded:
    rate: Annotated[float, Gt(0), Le(1)] = 1.0
    size: PositiveInt | None = None
    seed: Annotated[int, Le(2**63 - 1)] = 0
    loss: FiniteFloat = 0.0
    cap: Annotated[float, Gt(0)] = math.inf
    beta: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    pair: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    names: Annotated[tuple[str, ...], MinLen(1)] = ("a",)
    parts: Annotated[Mapping[str, PositiveFloat], Len(1, 2)] | None = None


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("rate", 0, r"^rate of Bounded must be a number above 0 and at most 1; found 0 \(int\)\.$"),
        ("rate", 1.5, "above 0 and at most 1; found 1.5"),
        ("rate", math.nan, "above 0 and at most 1; found nan"),
        ("rate", True, r"found True \(bool\)"),
        ("rate", "1", r"found '1' \(str\)"),
        ("size", 0, r"a whole number of at least 1 or None; found 0"),
        ("size", 1.5, "a whole number of at least 1 or None; found 1.5"),
        ("seed", 2**63, "a whole number of at most 9223372036854775807; found 9223372036854775808"),
        ("loss", math.inf, r"must be a finite number; found inf"),
        ("loss", math.nan, r"must be a finite number; found nan"),
        ("cap", math.nan, "must be a number above 0; found nan"),
        ("beta", 1.0, "a number of at least 0 and below 1; found 1.0"),
        ("pair", (1.0, -1.0), r"a tuple, a finite number of at least 0, .* \(tuple\), with float at 1"),
        ("names", [], r"a tuple, each a string, of length at least 1; found \[\]"),
        ("parts", {}, "a mapping, a string to a finite number above 0, of length at least 1 and of length at most 2"),
        ("parts", {"a": -1.0}, "found {'a': -1.0}"),
    ],
)
def test_bounds_are_marks_of_the_annotation(name, given, said):
    with pytest.raises(SettingsError, match=said):
        Bounded(**{name: given})


def test_what_is_within_its_bounds_is_converted():
    made = Bounded(rate=1, size=np.int32(3), cap=math.inf, beta=0, names=["b"], parts={"a": 1})
    assert (type(made.rate), type(made.size), made.names, made.parts) == (float, int, ("b",), {"a": 1.0})


def test_all_refused_fields_are_listed_and_a_mark_without_a_rule_is_an_error():
    with pytest.raises(SettingsError) as refused:
        Bounded(rate=-1, loss=math.nan, names=())
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["rate", "loss", "names"]

    @settings_record
    class Even:
        size: Annotated[int, MultipleOf(2)] = 2

    with pytest.raises(TypeError, match=r"cannot check MultipleOf\(multiple_of=2\); it reads gt, ge"):
        Even()


def test_named_tuples_are_checked_too():
    @record_tuple
    class Place(NamedTuple):
        name: str
        index: int = 0

    assert Place("a", np.int32(3)) == ("a", 3)
    assert type(Place("a", 3.0).index) is int
    with pytest.raises(DataError, match=r"name of Place must be a string; found 1 \(int\)"):
        Place(1)


class Hostile:
    def __getattr__(self, name):
        raise OSError(name)

    def __repr__(self):
        raise OSError("no words")


@given(st.sampled_from(["name", "count", "share", "is_on", "kind", "words", "names", "pair", "parts", "inner", "ids"]))
def test_a_value_that_raises_when_it_is_read_is_refused(name):
    with pytest.raises(RLError, match="an object whose repr failed"):
        Record(**{name: Hostile()})


# -- the records themselves


def test_a_list_of_tokens_becomes_an_int32_array():
    assert Prompt(uid="p", input_ids=[1, 2]).input_ids.dtype == np.int32


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prompt(uid=3, input_ids=ARRAY),
        lambda: Prompt(uid="p", input_ids=["a"]),
        lambda: Prompt(uid="p", input_ids=ARRAY, messages={"role": "user"}),
        lambda: make_trajectory("p", "0"),
        lambda: make_trajectory("p", 0, reward="1"),
        lambda: make_trajectory("p", 0, finish_reason="done"),
        lambda: Timings(generate_s="1"),
        lambda: TaskSpec(name="train", needs="reward"),
        lambda: TaskSpec(name="train", needs=[], order="random"),
        lambda: QueueOptions(capacity_rows="8"),
        lambda: ResourcePool(name="p", size=1.5),
        lambda: RowKey(1, 0, 0),
        lambda: RowKey("p", "0", 0),
        lambda: Batch([("p", 0)], {}),
        lambda: Batch([RowKey("p", 0, 0)], {"reward": ["1"]}),
        lambda: Batch([RowKey("p", 0, 0)], {"input_ids": [[1]]}),
    ],
)
def test_records_are_refused_where_they_are_made(make):
    with pytest.raises((DataError, SettingsError, ShapeError), match="must"):
        make()


def test_a_trajectory_of_lists_is_one():
    row = make_trajectory("p", 0)
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    same = Trajectory(prompt_uid="p", session_index=0, **{name: getattr(row, name).tolist() for name in names})
    assert all(np.array_equal(getattr(same, name), getattr(row, name)) for name in names)
    assert [getattr(same, name).dtype for name in names] == [np.int32, np.bool_, np.float32, np.int32]
    assert TaskSpec(name="train", needs=["reward"]).needs == frozenset({"reward"})
    assert QueueOptions(directory="queue").directory == Path("queue")
    assert Ragged([1, 2, 3], [0, 1, 3])[1].tolist() == [2, 3]


def test_a_refusal_shows_no_secret():
    @settings_record
    class Server:
        url: str
        env: Mapping[str, str] = field(default_factory=dict)
        api_key: str = ""

    for broken in ({"env": {"TOKEN": "sesame-9", "PORT": 1}}, {"api_key": ["sesame-9"]}, {"env": ["sesame-9"]}):
        with pytest.raises(SettingsError, match="must be") as refused:
            Server(url="https://me:sesame-9@example.org", **broken)
        assert "sesame-9" not in str(refused.value)
