"""Errors that cross a process boundary keep their text."""

import pickle

import pytest

from rl_core.cluster import RoleSpec
from rl_core.cluster.messages import RemoteError
from rl_core.errors import MissingExtraError, RoleDiedError, RoleError, SettingsError, WeightProofError


class OwnError(Exception):
    """An error class from outside rl-core."""


class TimeoutError(Exception):  # noqa: A001 - on purpose
    """Another project's class with the name of a built-in error."""


def cross(error):
    """Return an error as the calling process receives it."""
    try:
        raise error
    except BaseException as raised:
        return pickle.loads(pickle.dumps(RemoteError.of(raised))).rebuild(RoleSpec(name="engine", factory="", rank=1))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ValueError(),
        ValueError(3, None, 0.5),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "weights.bin"),
        ImportError("no module", name="vllm"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(4),
        SettingsError("group_size must be 2"),
        MissingExtraError("install rl-core[ray]"),
        WeightProofError("differs"),
        WeightProofError("differs", tensor="lm_head.weight"),
        RoleDiedError("it died", role="engine", rank=1),
    ],
    ids=repr,
)
def test_standard_errors_and_ours_arrive_as_they_were(error):
    arrived = cross(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    for name in ("tensor", "errno", "filename", "name", "value"):
        assert getattr(arrived, name, None) == getattr(error, name, None)
    assert arrived.__notes__[0].startswith("Traceback in engine[1]:\nTraceback (most recent call last)")
    assert (arrived.role, arrived.rank) == ("engine", 1)


@pytest.mark.parametrize(
    "error", [OwnError("out of luck"), TimeoutError("out of luck"), KeyboardInterrupt("out of luck")]
)
def test_errors_of_other_classes_arrive_as_role_errors(error):
    arrived = cross(error)
    assert type(arrived) is RoleError
    assert str(arrived) == f"engine[1] raised {type(error).__name__}: out of luck"


def test_a_group_of_errors_arrives_with_all_of_them_in_the_traceback():
    arrived = cross(ExceptionGroup("several", [ValueError("first"), OwnError("second")]))
    assert type(arrived) is RoleError
    assert "several (2 sub-exceptions)" in str(arrived)
    assert "first" in arrived.__notes__[0]
    assert "second" in arrived.__notes__[0]


def test_what_is_not_plain_arrives_as_text():
    arrived = cross(ValueError({"rows": [1, 2]}))
    assert type(arrived) is ValueError
    assert str(arrived) == "{'rows': [1, 2]}"


def test_causes_are_in_the_traceback_and_notes_arrive():
    error = ValueError("outer")
    error.__cause__ = OwnError("inner")
    error.add_note("while publishing version 3")
    arrived = cross(error)
    assert arrived.__notes__[0] == "while publishing version 3"
    assert "OwnError: inner" in arrived.__notes__[1]
    assert "direct cause" in arrived.__notes__[1]


def test_the_role_that_raised_first_stays_named():
    arrived = cross(RoleError("teacher[3] raised ValueError", role="teacher", rank=3))
    assert (arrived.role, arrived.rank) == ("teacher", 3)
