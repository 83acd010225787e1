"""Encoding of prompts as JSON."""

from dataclasses import fields

import msgspec

from rl_core.data.records import Prompt
from rl_core.errors import DataError, ShapeError


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
        columns = dict(prompt.columns)
        messages = [dict(message) for message in prompt.messages]
        found = {one.name: getattr(prompt, one.name) for one in fields(Prompt)}
        found |= {"input_ids": prompt.input_ids.tolist(), "messages": messages, "columns": columns}
        return msgspec.json.encode(found)
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
        return Prompt(**msgspec.json.decode(encoded))
    except (msgspec.MsgspecError, TypeError, DataError, ShapeError) as error:
        raise DataError(f"a prompt cannot be decoded: {error}.") from error
