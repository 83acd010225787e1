"""Pickles become plain records; no code runs, and allocations are bounded."""

import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.plain_pickle import Record, read_plain_pickle

ORDERED_DICT = "collections.OrderedDict"


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_values_are_as_they_were() -> None:
    value = {
        "numbers": [0, 1, 255, 256, -1, 2**31, -(2**40), 2**70],
        "texts": ("", "é", "x" * 300),
        "constants": (None, True, False),
        "nested": {"empty": ((), [], {}), "one": (1,), "four": (1, 2, 3, 4)},
    }
    assert read_plain_pickle(pickle.dumps(value, 4), allowed=()) == value
    assert read_plain_pickle(pickle.dumps(value, 2), allowed=()) == value


def test_what_is_shared_stays_shared() -> None:
    shared = ["one"]
    first, second = read_plain_pickle(pickle.dumps((shared, shared)), allowed=())
    assert first is second


def test_objects_become_records() -> None:
    found = read_plain_pickle(pickle.dumps([OrderedDict, OrderedDict()]), allowed={ORDERED_DICT})
    assert [type(record) for record in found] == [Record, Record]
    assert [(record.name, record.args, record.state) for record in found] == [
        (ORDERED_DICT, None, None),
        (ORDERED_DICT, (), None),
    ]


@pytest.mark.parametrize("protocol", range(6))
def test_what_is_not_allowed_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(Bomb(tmp_path / "ran"), protocol)
    with pytest.raises(CheckpointError, match=r"names (posix|os)\.mkdir|uses the operation"):
        read_plain_pickle(content, allowed={ORDERED_DICT})
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists()  # plain unpickling runs the code


def nested(depth: int) -> bytes:
    return b"\x80\x04}" + b")" + b"\x85" * depth


HOSTILE = {
    "memo of four billion": b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "bytes of any size": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "text of any size": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "longer than a size": b"\x80\x04\x8d" + struct.pack("<Q", 2**64 - 1) + b"x.",
    "frame of any size": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N",
    "number of any length": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "deep key": nested(300_000) + b"Ns.",
    "deep": nested(200_000) + b".",
    "key of a list": b"\x80\x04}]Ns.",
    "key twice": b"\x80\x04}(\x8c\x01aN\x8c\x01aNu.",
    "odd items": b"\x80\x04}(\x8c\x01au.",
    "state of a list": b"\x80\x04](Nb.",
    "state twice": b"\x80\x04ccollections\nOrderedDict\n)\x81}b}b.",
    "called object": b"\x80\x04ccollections\nOrderedDict\n)\x81)R.",
    "called text": b"\x80\x04\x8c\x01a)R.",
    "arguments of no tuple": b"\x80\x04ccollections\nOrderedDict\n]R.",
    "nothing on the stack": b"\x80\x04R.",
    "no mark": b"\x80\x04Nt.",
    "mark left": b"\x80\x04(N.",
    "two results": b"\x80\x04NN.",
    "no result": b"\x80\x04.",
    "memo of nothing": b"\x80\x04h\x07.",
    "extension": b"\x80\x04\x82\x01.",
    "old instance": b"(ios\nsystem\n.",
    "out of band": b"\x80\x05\x97.",
    "no operation": b"\xff",
    "no pickle": b"PK\x03\x04",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams_are_refused_and_take_no_memory(name: str) -> None:
    content = HOSTILE[name]
    tracemalloc.start()
    try:
        if name == "memo of four billion":  # takes one dictionary entry here
            assert read_plain_pickle(content, allowed={ORDERED_DICT}) is None
        else:
            with pytest.raises(CheckpointError, match=r"torn at byte|uses the operation|the pickle names"):
                read_plain_pickle(content, allowed={ORDERED_DICT})
        assert tracemalloc.get_traced_memory()[1] < 200 * len(content) + 1_000_000
    finally:
        tracemalloc.stop()


def test_any_end_is_refused() -> None:
    content = pickle.dumps({"a": (1, [2, 3]), "b": OrderedDict}, 4)
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            read_plain_pickle(content[:length], allowed={ORDERED_DICT})
