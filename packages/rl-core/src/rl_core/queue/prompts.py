"""Encoding of prompts as JSON."""

from typing import Any

import msgspec
import numpy as np

from rl_core.data.records import Prompt
from rl_core.errors import DataError


class _Encoded(msgspec.Struct, forbid_unknown_fields=True):
    uid: str
    input_ids: list[int]
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    columns: dict[str, Any]


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt's uid can be encoded.

    Raises:
        DataError: The uid is not a string that UTF-8 can encode.
    """
    try:
        prompt.uid.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the uid of a prompt must be valid Unicode; found {prompt.uid!r}.") from error


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt as JSON.

    Raises:
        DataError: The messages, ground truth or columns cannot be encoded as JSON.
    """
    check_prompt(prompt)
    try:
        return msgspec.json.encode(
            _Encoded(
                prompt.uid,
                prompt.input_ids.tolist(),
                [dict(message) for message in prompt.messages],
                prompt.data_source,
                prompt.ground_truth,
                dict(prompt.columns),
            )
        )
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(
            f"prompt {prompt.uid!r}, apart from its tokens, must consist of JSON values: {error}."
        ) from error


def decode_prompt(encoded: bytes) -> Prompt:
    """Decode a prompt from JSON.

    Raises:
        DataError: The JSON is not a prompt.
    """
    try:
        found = msgspec.json.decode(encoded, type=_Encoded)
        input_ids = np.asarray(found.input_ids, dtype=np.int32)
    except (msgspec.MsgspecError, OverflowError) as error:
        raise DataError(f"a prompt cannot be decoded: {error}.") from error
    return Prompt(
        uid=found.uid,
        input_ids=input_ids,
        messages=tuple(found.messages),
        data_source=found.data_source,
        ground_truth=found.ground_truth,
        columns=found.columns,
    )
