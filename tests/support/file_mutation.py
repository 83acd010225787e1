"""Mutate valid files and read the mutations."""

import json
import random
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rl_core.errors import RLError

MOST_CPU_S = 5

NASTY = ("Infinity", "-Infinity", "NaN", "1e999", "-1", "0", "9" * 400, "9" * 5000, "9223372036854775807", "1e400")
NASTY += ("null", "true", "{}", "[]", '""', '"\\ud800"', '"\\u0000"', "[" * 3000, '{"a":' * 3000, "-0.0", "2.5")
RAW = (b"\0", b"\xff\xfe", b"\n", b"\r", b",", b"'''", b'"', b"..", b"=", b"[[", b"\xed\xa0\x80", b"." * 2000)


class HangError(BaseException):
    """A case took too long."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        file: A valid file, which is mutated in place.
        read: Reads the file.
        is_others: A third-party library reads it.
    """

    file: Path
    read: Callable[[], object]
    is_others: bool = False


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to four changes; for JSON, half of them in its tree."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = _mutated_json(content, rng) if rng.random() < 0.5 else _mutated_bytes(content, rng)
    return content


def _mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    stop = min(len(content), start + rng.choice((0, 1, 2, 8, 64, 1024)))
    match rng.randrange(6):
        case 0:
            new = bytes([content[start] ^ 1 << rng.randrange(8)]) if start < len(content) else b""
            return content[:start] + new + content[start + 1 :]
        case 1:
            return content[:start] + content[stop:]
        case 2:
            return content[:start] + content[start:stop] * rng.choice((2, 3, 50)) + content[stop:]
        case 3:
            return content[:start] + rng.choice(NASTY).encode() + content[stop:]
        case 4:
            return content[:start] + rng.choice((*RAW, rng.randbytes(8))) + content[stop:]
        case _:
            return content[:start]


def _mutated_json(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n") if content.count(b"\n") and not content.startswith(b"{\n") else [content]
    place = rng.randrange(len(lines))
    try:
        document = json.loads(lines[place])
    except (ValueError, RecursionError):
        return _mutated_bytes(content, rng)
    nodes: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            items = list(node.items() if isinstance(node, dict) else enumerate(node))
            nodes += [(node, key) for key, _ in items]
            waiting += [value for _, value in items]
    if not nodes:
        return _mutated_bytes(content, rng)
    node, key = rng.choice(nodes)
    marker = "@@here@@"
    if rng.random() < 0.2:
        del node[key]
    else:
        node[key] = marker
    lines[place] = json.dumps(document).replace(f'"{marker}"', rng.choice(NASTY)).encode()
    return b"\n".join(lines)


def run_cases(name: str, format_: Format, *, cases: int, seed: int) -> None:
    """Read mutated files; keep the first that is neither read nor refused with one of our errors, and stop there.

    Raises:
        AssertionError: Names the case's file.
    """
    rng = random.Random(f"{name} {seed}")
    valid = format_.file.read_bytes()
    format_.read()
    for case in range(cases):
        content = mutated(valid, rng)
        format_.file.write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            format_.read()
        except RLError:
            pass
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            kept = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-")) / format_.file.name
            kept.write_bytes(content)
            raise AssertionError(
                f"{name}, case {case} of seed {seed}: {type(error).__name__}: {error}; {kept}"
            ) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    format_.file.write_bytes(valid)


def _hang(_: int, __: FrameType | None) -> None:
    raise HangError(f"it took {MOST_CPU_S} s")


def watch() -> None:
    """Raise HangError when a case exceeds its processor time."""
    signal.signal(signal.SIGPROF, _hang)
