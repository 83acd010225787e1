"""Read pickles of plain records without an unpickler: nothing that a pickle names is imported, created or called.

A restricted unpickler still allocates whatever a hostile stream requests (a memo of four billion entries, a bytearray
of any size), and hashes tuples of any depth. This reader instead interprets only the few operations that tables of
contents use. It builds numbers, strings, tuples, lists, dictionaries, and a `Record` in place of every other object.
"""

import pickletools
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from rl_core.errors import CheckpointError


class Record:
    """Stand-in for an object that a pickle would create: its class or function by name, its arguments and its state.

    Attributes:
        name: Qualified name, e.g. "torch.Size".
        args: Arguments of the call; None if the pickle names the class or function without calling it.
        state: State assigned after the call; None for none.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        """Store the name and arguments; nothing is imported."""
        self.name, self.args, self.state = name, args, None

    def __repr__(self) -> str:
        return self.name


PERSISTENT = "persistent id"
"""Name of the record that stands for a persistent id; its only argument is the id."""


def read_plain_pickle(content: bytes, *, allowed: Collection[str]) -> Any:
    """Decode a pickle, with a `Record` in place of every class, function and object.

    Args:
        content: Bytes of the pickle.
        allowed: Qualified names that may occur.

    Raises:
        CheckpointError: The pickle is torn, or uses an operation or name that is not allowed.
    """
    machine = _Machine(allowed)
    position = 0
    try:
        for operation, argument, at in pickletools.genops(content):
            position = at or 0
            machine.run(operation.name, argument)
        return machine.result()
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"the pickle is torn at byte {position}: {type(error).__name__}: {error}") from None


class _Machine:
    """The stack machine that interprets a pickle."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Execute one operation."""
        if name in _VALUES:
            self._stack.append(_VALUES[name]() if argument is None else argument)
        elif name in self._OPERATIONS:
            self._OPERATIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise CheckpointError(
                f"the pickle uses the operation {name}, which no plain record needs; no object was created"
            )

    def result(self) -> Any:
        """Return the result after the last operation."""
        (found,) = self._stack
        if self._below:
            raise ValueError("a mark is left on the stack")
        return found

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _keep(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _keep_as(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _recall(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def _tuple(self, size: int) -> None:
        found = tuple(self._pop(size))
        self._stack.append(found)

    def _tuple_since_mark(self, _: Any) -> None:
        found = tuple(self._since_mark())
        self._stack.append(found)

    def _append(self, values: list[Any]) -> None:
        _of_type(self._stack[-1], list).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = _of_type(self._stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | Record) or key in target:
                raise ValueError("a key occurs twice, or is neither a string nor a record")
            target[key] = value

    def _pop(self, size: int) -> list[Any]:
        if len(self._stack) < size:
            raise IndexError("too few values on the stack")
        found = self._stack[-size:]
        del self._stack[-size:]
        return found

    def _name(self, name: str) -> None:
        if name not in self._allowed:
            raise CheckpointError(f"the pickle names {name}, which no plain record needs; no object was created")
        self._stack.append(Record(name))

    def _name_on_stack(self, _: Any) -> None:
        module, name = self._pop(2)
        self._name(f"{_of_type(module, str)}.{_of_type(name, str)}")

    def _make(self, _: Any) -> None:
        made, args = self._pop(2)
        if _of_type(made, Record).args is not None:
            raise TypeError("a created object was called")
        self._stack.append(Record(made.name, _of_type(args, tuple)))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        record = _of_type(self._stack[-1], Record)
        if record.args is None or record.state is not None:
            raise TypeError("a state was set on an object that accepts none")
        record.state = state

    def _persistent(self, _: Any) -> None:
        self._stack.append(Record(PERSISTENT, tuple(self._pop(1))))

    _OPERATIONS: ClassVar[dict[str, Callable[["_Machine", Any], None]]] = {
        "MARK": _mark,
        "MEMOIZE": _keep,
        "BINPUT": _keep_as,
        "LONG_BINPUT": _keep_as,
        "BINGET": _recall,
        "LONG_BINGET": _recall,
        "TUPLE": _tuple_since_mark,
        "TUPLE1": lambda self, _: self._tuple(1),
        "TUPLE2": lambda self, _: self._tuple(2),
        "TUPLE3": lambda self, _: self._tuple(3),
        "APPEND": lambda self, _: self._append(self._pop(1)),
        "APPENDS": lambda self, _: self._append(self._since_mark()),
        "SETITEM": lambda self, _: self._set_items(self._pop(2)),
        "SETITEMS": lambda self, _: self._set_items(self._since_mark()),
        "GLOBAL": lambda self, name: self._name(name.replace(" ", ".", 1)),
        "STACK_GLOBAL": _name_on_stack,
        "REDUCE": _make,
        "NEWOBJ": _make,
        "BUILD": _build,
        "BINPERSID": _persistent,
    }


_VALUES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    # An operation with an argument pushes that argument.
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), lambda: None),
}


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"found {type(value).__name__} instead of {kind.__name__}")
    return value
