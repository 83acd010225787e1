"""Describes one entry for `rl-rollout cache show`: its prompts and responses, as text if a tokenizer is available."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.data import IntArray, Trajectory
from rl_core.errors import MissingExtraError, RLError
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.commands import as_plain, describe_entry, verify_entry
from rl_rollout.skip.manifest import EntryKey, Manifest
from rl_rollout.skip.store import EntryStore

MAX_ORIGIN = 4096

Decode = Callable[[IntArray], str | None]
"""Decodes tokens, including special ones; returns None without a tokenizer or for unknown tokens."""


def show_entry(
    store: EntryStore, key: EntryKey, *, max_groups: int, max_sessions: int, tokenizer: Path | None
) -> dict[str, Any]:
    """Read a complete entry and describe it with its first prompts and responses.

    Args:
        store: Store of the directory.
        key: Key of the entry.
        max_groups: Maximum number of prompts.
        max_sessions: Maximum number of sessions per prompt.
        tokenizer: Folder of a tokenizer; None uses the policy's folder, if the entry names an existing one.

    Returns:
        `entry`, the report of `ls`, and as JSON values `arrays`, `tokenizer` (the source of the texts) and `groups`.

    Raises:
        BrokenEntryError: The entry is broken.
        SettingsError: The given folder has no tokenizer.
        MissingExtraError: zarr, or transformers for the given tokenizer, is not installed.
    """
    entry, report = store.read(key), describe_entry(store, key)
    if entry is None or report is None:
        return {"entry": verify_entry(store, key), "arrays": [], "tokenizer": "", "groups": []}
    decode, said = _find_decoder(entry.manifest, tokenizer)
    groups = [_group(index, group, decode, max_sessions) for index, group in enumerate(entry.groups[:max_groups])]
    return {
        "entry": report,
        "arrays": _arrays(entry.manifest),
        "tokenizer": said,
        "groups": as_plain(groups),
    }


def _find_decoder(manifest: Manifest, folder: Path | None) -> tuple[Decode, str]:
    """Return a decoder for the given folder or else the policy's, and a description of its source."""
    hint = "none: tokens are shown as numbers; give --tokenizer FOLDER for text"
    origin = _origin(manifest) if folder is None else folder
    if origin is None:
        return _no_text, hint
    try:
        tokenizer = PromptTokenizer.load(origin)
    except RLError as error:
        if folder is not None:
            raise
        needs = f" (the one of {origin} needs transformers)" if isinstance(error, MissingExtraError) else ""
        return _no_text, f"{hint}{needs}"

    def decode(ids: IntArray) -> str | None:
        try:
            return tokenizer.decode([ids], skip_special_tokens=False)[0]
        except Exception:  # error types for unknown ids differ between tokenizers
            return None

    said = f"from {origin}" if folder is not None else f"from {origin}, the entry's policy"
    made_with = manifest.fingerprint.get("tokenizer")
    stored = made_with.get("vocabulary") if isinstance(made_with, dict) else None
    if stored is not None and stored != tokenizer.fingerprint["vocabulary"]:
        said += "; NOT the entry's own tokenizer: the vocabularies differ, and the text may be wrong"
    return decode, said


def _no_text(_ids: IntArray) -> None:
    return None


def _origin(manifest: Manifest) -> Path | None:
    policy = manifest.fingerprint.get("policy")
    origin = policy.get("origin") if isinstance(policy, dict) else None
    if not isinstance(origin, str) or not 0 < len(origin) <= MAX_ORIGIN or "\0" in origin:
        return None
    try:
        return Path(origin) if Path(origin).is_dir() else None
    except (OSError, ValueError):
        return None


def _arrays(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": spec.dtype,
            "num_values": spec.shape[0],
            "size_bytes": spec.metadata.size_bytes + sum(chunk.size_bytes for chunk in spec.chunks),
            "is_compressed": spec.is_compressed,
        }
        for name, spec in manifest.arrays.items()
    ]


def _group(index: int, group: GroupResult, decode: Decode, max_sessions: int) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "index": index,
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "messages": prompt.messages,
        "prompt_ids": prompt.input_ids.tolist(),
        "prompt": decode(prompt.input_ids),
        "ground_truth": prompt.ground_truth,
        "columns": dict(prompt.columns),
        "num_sessions": len(group.sessions),
        "num_failed": len(group.failures),
        "sessions": [
            {
                "index": number,
                "failure": session.failure,
                "trajectories": [_trajectory(row, decode) for row in session.trajectories],
            }
            for number, session in enumerate(group.sessions[:max_sessions])
        ],
    }


def _trajectory(row: Trajectory, decode: Decode) -> dict[str, Any]:
    response = row.input_ids[row.num_prompt_tokens :]
    versions = row.policy_versions[row.loss_mask]
    return {
        "parent": row.parent,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_response_tokens": row.num_response_tokens,
        "num_trained_tokens": int(row.loss_mask.sum()),
        "response_ids": response.tolist(),
        "response": decode(response),
        "finish_reason": row.finish_reason,
        "reward": row.reward,
        "reward_components": dict(row.reward_components),
        "policy_versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "timings": {name: getattr(row.timings, name) for name in ("generate_s", "tools_s", "reward_s", "preemptions")},
        "extras": dict(row.extras),
    }
