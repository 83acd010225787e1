"""One entry for `rl-rollout cache show`: its prompts and responses, as text where a tokenizer is at hand."""

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
"""Gives tokens as text, special ones too; None without a tokenizer, or for tokens that it does not know."""


def show_entry(
    store: EntryStore, key: EntryKey, *, max_groups: int, max_sessions: int, tokenizer: Path | None
) -> dict[str, Any]:
    """Read an entry whole, and describe it with its first prompts and responses.

    Args:
        store: Of the directory.
        key: Which entry.
        max_groups: Most prompts.
        max_sessions: Most sessions of each prompt.
        tokenizer: Its folder; None takes the policy's, where the entry names a folder that exists.

    Returns:
        `entry` as `ls` describes it, and as JSON values its `arrays`, which `tokenizer` made the texts, and `groups`.

    Raises:
        BrokenEntryError: It is not whole.
        SettingsError: The folder that was named has no tokenizer.
        MissingExtraError: zarr is not installed, or transformers for the tokenizer that was named.
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
    """The tokenizer of a folder, or of the policy's where the fingerprint names one; and which it is, in words."""
    hint = "none: tokens are shown as numbers; give --tokenizer FOLDER for text"
    origin = _origin(manifest) if folder is None else folder
    if origin is None:
        return _no_text, hint
    try:
        tokenizer = PromptTokenizer.load(origin)
    except RLError as error:
        if folder is not None:
            raise
        needs = f" (that of {origin} needs transformers)" if isinstance(error, MissingExtraError) else ""
        return _no_text, f"{hint}{needs}"

    def decode(ids: IntArray) -> str | None:
        try:
            return tokenizer.decode([ids], skip_special_tokens=False)[0]
        except Exception:  # each tokenizer raises its own kinds for an id that it does not know
            return None

    said = f"of {origin}" if folder is not None else f"of {origin}, the policy that the entry names"
    made_with = manifest.fingerprint.get("tokenizer")
    stored = made_with.get("vocabulary") if isinstance(made_with, dict) else None
    if stored is not None and stored != tokenizer.fingerprint["vocabulary"]:
        said += "; NOT the entry's own: its vocabulary is another, and the text may be wrong"
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
