"""What one entry holds, for people: its prompts and responses, as text where a tokenizer is at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import MissingExtraError, RLError
from rl_core.records import IntArray, Trajectory
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.commands import describe_entry
from rl_rollout.skip.manifest import EntryKey, Manifest
from rl_rollout.skip.report import EntryReport, Fault, as_plain
from rl_rollout.skip.store import EntryStore

MAX_ORIGIN = 4096


class ShownArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of an entry.

    Attributes:
        name: Which.
        dtype: numpy's name of it.
        num_values: How many values it has.
        size_bytes: Of its files.
        is_compressed: Whether its chunks are compressed.
    """

    name: str
    dtype: str
    num_values: int
    size_bytes: int
    is_compressed: bool


class ShownTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory.

    Attributes:
        num_prompt_tokens: Tokens before the first sampled one.
        num_response_tokens: Tokens from there on, tool output among them.
        num_trained_tokens: Tokens that were sampled.
        response_ids: Tokens from the first sampled one on.
        response: The same as text; None without a tokenizer.
        finish_reason: Why the last response ended.
        reward: Scalar reward.
        reward_components: Named parts of it.
        policy_versions: Oldest and newest that sampled it; None where no token was sampled.
        timings: Seconds and preemptions, by name.
        extras: Anything else.
    """

    num_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    response_ids: tuple[int, ...]
    response: str | None
    finish_reason: str
    reward: float | None
    reward_components: dict[str, Any]
    policy_versions: tuple[int, int] | None
    timings: dict[str, Any]
    extras: dict[str, Any]


class ShownSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session.

    Attributes:
        index: Of the group's sessions, from 0.
        failure: Why it cannot train; None when it can.
        trajectories: All of it.
    """

    index: int
    failure: str | None
    trajectories: tuple[ShownTrajectory, ...]


class ShownGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its first sessions.

    Attributes:
        index: Of the entry's prompts, from 0.
        uid: Of the prompt.
        data_source: Of the prompt.
        messages: As given.
        prompt_ids: Its tokens.
        prompt: The same as text; None without a tokenizer.
        ground_truth: Of the prompt.
        columns: Of the prompt's row.
        num_sessions: How many there are.
        num_failed: How many of these failed.
        sessions: The first of them.
    """

    index: int
    uid: str
    data_source: str
    messages: tuple[Any, ...]
    prompt_ids: tuple[int, ...]
    prompt: str | None
    ground_truth: Any
    columns: dict[str, Any]
    num_sessions: int
    num_failed: int
    sessions: tuple[ShownSession, ...]


class ShownEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What `show` says.

    Attributes:
        directory: As it was given.
        choice: Why this entry, where none was named.
        entry: What `ls` says of it.
        arrays: What it has on disk.
        tokenizer: What made text of tokens, or why nothing did.
        groups: The first prompts.
    """

    directory: str
    choice: str | None
    entry: EntryReport
    arrays: tuple[ShownArray, ...]
    tokenizer: str
    groups: tuple[ShownGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """How much of an entry is shown.

    Attributes:
        max_groups: Prompts at most.
        max_sessions: Sessions of each at most.
        tokenizer: Folder of the tokenizer; None takes the policy's, where the entry names a folder that is there.
    """

    max_groups: int
    max_sessions: int
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Makes text of tokens.

    Attributes:
        tokenizer: None where there is none.
        said: What it is, or why there is none, for people.
    """

    tokenizer: PromptTokenizer | None
    said: str

    def text(self, ids: IntArray) -> str | None:
        """Text of tokens, special ones too; None where there is no tokenizer, or they are none of its tokens."""
        if self.tokenizer is None:
            return None
        try:
            return self.tokenizer.decode([ids], skip_special_tokens=False)[0]
        except Exception:  # each tokenizer raises its own kinds for an id that it does not know
            return None


def show_entry(
    store: EntryStore, key: EntryKey, directory: str, *, choice: str | None, options: ShowOptions
) -> ShownEntry:
    """Read an entry whole, and describe it with its first prompts and responses.

    Raises:
        BrokenEntryError: It is not whole.
        SettingsError: The folder that was named has no tokenizer.
        MissingExtraError: zarr is not installed, or transformers for the tokenizer that was named.
    """
    entry, report = store.read(key), describe_entry(store, key)
    if entry is None or report is None:
        fault = Fault(path=store.folder.path_of(key.name), reason="it was removed meanwhile")
        gone = EntryReport(name=key.name, key=key, fault=fault)
        return ShownEntry(directory=directory, choice=choice, entry=gone, arrays=(), tokenizer="", groups=())
    decoder = find_decoder(entry.manifest, options.tokenizer)
    first = entry.groups[: options.max_groups]
    return ShownEntry(
        directory=directory,
        choice=choice,
        entry=report,
        arrays=_arrays(entry.manifest),
        tokenizer=decoder.said,
        groups=tuple(_group(index, group, decoder, options.max_sessions) for index, group in enumerate(first)),
    )


def find_decoder(manifest: Manifest, folder: Path | None) -> Decoder:
    """The tokenizer of a folder, or of the policy's, where the fingerprint names one that is here.

    Raises:
        SettingsError: The folder that was named has no tokenizer.
        MissingExtraError: transformers is not installed, and a folder was named.
    """
    if folder is not None:
        tokenizer = PromptTokenizer.load(folder)
        return Decoder(tokenizer=tokenizer, said=f"of {folder}{_other_tokenizer(tokenizer, manifest)}")
    hint = "none: tokens are shown as numbers; give --tokenizer FOLDER for text"
    origin = _origin(manifest.fingerprint)
    if origin is None:
        return Decoder(tokenizer=None, said=hint)
    try:
        tokenizer = PromptTokenizer.load(origin)
    except MissingExtraError:
        return Decoder(tokenizer=None, said=f"{hint} (that of {origin} needs transformers)")
    except RLError:
        return Decoder(tokenizer=None, said=hint)
    return Decoder(
        tokenizer=tokenizer, said=f"of {origin}, the policy that the entry names{_other_tokenizer(tokenizer, manifest)}"
    )


def _origin(fingerprint: dict[str, Any]) -> Path | None:
    policy = fingerprint.get("policy")
    origin = policy.get("origin") if isinstance(policy, dict) else None
    if not isinstance(origin, str) or not 0 < len(origin) <= MAX_ORIGIN or "\0" in origin:
        return None
    try:
        return Path(origin) if Path(origin).is_dir() else None
    except (OSError, ValueError):
        return None


def _other_tokenizer(tokenizer: PromptTokenizer, manifest: Manifest) -> str:
    """A warning where the entry was made with another vocabulary."""
    made_with = manifest.fingerprint.get("tokenizer")
    stored = made_with.get("vocabulary") if isinstance(made_with, dict) else None
    if stored is None or stored == tokenizer.fingerprint["vocabulary"]:
        return ""
    return "; NOT the entry's own: its vocabulary is another, and the text may be wrong"


def _arrays(manifest: Manifest) -> tuple[ShownArray, ...]:
    return tuple(
        ShownArray(
            name=name,
            dtype=spec.dtype,
            num_values=spec.shape[0],
            size_bytes=spec.metadata.size_bytes + sum(chunk.size_bytes for chunk in spec.chunks),
            is_compressed=spec.is_compressed,
        )
        for name, spec in manifest.arrays.items()
    )


def _group(index: int, group: GroupResult, decoder: Decoder, max_sessions: int) -> ShownGroup:
    prompt = group.prompt
    return ShownGroup(
        index=index,
        uid=prompt.uid,
        data_source=prompt.data_source,
        messages=tuple(as_plain(prompt.messages, is_finite=False)),
        prompt_ids=tuple(prompt.input_ids.tolist()),
        prompt=decoder.text(prompt.input_ids),
        ground_truth=as_plain(prompt.ground_truth, is_finite=False),
        columns=as_plain(dict(prompt.columns), is_finite=False),
        num_sessions=len(group.sessions),
        num_failed=len(group.failures),
        sessions=_sessions(group.sessions[:max_sessions], decoder),
    )


def _sessions(sessions: Sequence[SessionResult], decoder: Decoder) -> tuple[ShownSession, ...]:
    return tuple(
        ShownSession(
            index=index,
            failure=session.failure,
            trajectories=tuple(_trajectory(row, decoder) for row in session.trajectories),
        )
        for index, session in enumerate(sessions)
    )


def _trajectory(row: Trajectory, decoder: Decoder) -> ShownTrajectory:
    response = row.input_ids[row.num_prompt_tokens :]
    versions = row.policy_versions[row.loss_mask]
    timings = row.timings
    return ShownTrajectory(
        num_prompt_tokens=row.num_prompt_tokens,
        num_response_tokens=row.num_response_tokens,
        num_trained_tokens=int(row.loss_mask.sum()),
        response_ids=tuple(response.tolist()),
        response=decoder.text(response),
        finish_reason=row.finish_reason,
        reward=row.reward,
        reward_components=as_plain(dict(row.reward_components), is_finite=False),
        policy_versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        timings={
            name: as_plain(getattr(timings, name)) for name in ("generate_s", "tools_s", "reward_s", "preemptions")
        },
        extras=as_plain(dict(row.extras), is_finite=False),
    )
