"""Two common schemas of a row: messages with a `reward_model`, and a plain `prompt` with an `answer`."""

import json
from collections.abc import Mapping
from hashlib import blake2b

from rl_core.data import Json, encodable_json
from rl_core.errors import DataError
from rl_core.record_fields import record

WITHOUT = "set prompts.requires_ground_truth = false to allow such rows"


@record
class Problem:
    """The content of a row before tokenization.

    Attributes:
        messages: Chat messages; empty for a plain prompt. Each image is a part `{"type": "image", "digest": ...}`.
        text: The plain prompt; None when there are messages.
        data_source: Name of the dataset.
        ground_truth: Reference that the reward compares with.
        columns: Columns of the row, with text passed through `encodable`.
    """

    messages: tuple[Mapping[str, Json], ...]
    text: str | None
    data_source: str
    ground_truth: Json
    columns: Mapping[str, Json]

    def digest(self) -> str:
        """Return 12 hex digits of the prompt, source and ground truth, equal on every machine."""
        parts = [self.text if self.text is not None else self.messages, self.data_source, self.ground_truth]
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
        return blake2b(canonical.encode(), digest_size=6).hexdigest()


def read_problem(row: Mapping[str, Json], *, where: str, requires_ground_truth: bool = True) -> Problem:
    """Check a row and split it into its parts.

    Args:
        row: Columns by name. `prompt` is a list of messages (`role`, `content`) or a string, without bytes of images;
            see `ImageReader`. The ground
            truth is `reward_model.ground_truth`, or else `answer`. `data_source` is optional.
        where: File and row, for messages.
        requires_ground_truth: Refuse rows with neither ground truth nor answer.

    Raises:
        DataError: A field is missing or has another type. The message names file, row and field.
    """
    prompt = row.get("prompt")
    if prompt is None:
        found = ", ".join(sorted(map(str, row)))
        raise DataError(
            f"{where}, field `prompt`: missing. Expected a string or a list of messages; found the columns {found}."
        )
    try:
        columns: dict[str, Json] = encodable_json(row)
    except DataError as error:
        raise DataError(f"{where}: found {error}") from error
    source = columns.get("data_source")
    if source is not None and (not isinstance(source, str) or not source):
        raise DataError(f"{where}, field `data_source`: expected a non-empty string, found {_show(source)}.")
    is_plain = isinstance(prompt, str)
    if is_plain:
        if not prompt:
            raise DataError(f"{where}, field `prompt`: expected text, found an empty string.")
        _check_unicode(prompt, where=where, field="prompt")
    return Problem(
        messages=() if is_plain else _read_messages(prompt, where=where),
        text=prompt if is_plain else None,
        data_source=source or "default",
        ground_truth=_read_ground_truth(columns, where=where, is_required=requires_ground_truth),
        columns=columns,
    )


def _read_messages(prompt: Json, *, where: str) -> tuple[Mapping[str, Json], ...]:
    if not isinstance(prompt, list):
        raise DataError(f"{where}, field `prompt`: expected a string or a list of messages, found {_show(prompt)}.")
    if not prompt:
        raise DataError(f"{where}, field `prompt`: expected at least one message, found an empty list.")
    return tuple(_read_message(message, where=where, field=f"prompt[{i}]") for i, message in enumerate(prompt))


def _read_message(message: Json, *, where: str, field: str) -> Mapping[str, Json]:
    if not isinstance(message, dict):
        raise DataError(f"{where}, field `{field}`: expected an object with role and content, found {_show(message)}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f"{where}, field `{field}.role`: expected a string, found {_show(role)}.")
    if not role:
        raise DataError(f"{where}, field `{field}.role`: expected a role such as 'user', found an empty string.")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, where=where, field=f"{field}.content[{index}]")
    elif isinstance(content, str):
        _check_unicode(content, where=where, field=f"{field}.content")
    else:
        raise DataError(f"{where}, field `{field}.content`: expected a string, found {_show(content)}.")
    # Arrow adds every key of the column to each message, but templates test whether a key is present.
    kept: dict[str, Json] = encodable_json({key: value for key, value in message.items() if value is not None})
    return kept


def _check_part(part: Json, *, where: str, field: str) -> None:
    """Check a part of a message with images, as `ImageReader` leaves it."""
    if isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("digest"), str):
        return
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where}, field `{field}`: expected a part of type 'text' or 'image', found {_show(part)}.")
    _check_unicode(part["text"], where=where, field=field)


def _read_ground_truth(row: Mapping[str, Json], *, where: str, is_required: bool) -> Json:
    reward_model = row.get("reward_model")
    if reward_model is not None:
        if not isinstance(reward_model, dict):
            raise DataError(f"{where}, field `reward_model`: expected an object, found {_show(reward_model)}.")
        if reward_model.get("ground_truth") is not None:
            return reward_model["ground_truth"]
        if is_required:
            raise DataError(
                f"{where}, field `reward_model.ground_truth`: missing. Add the reference for the reward, or {WITHOUT}."
            )
    answer = row.get("answer")
    if answer is None and is_required:
        raise DataError(
            f"{where}, field `answer`: missing, and there is no `reward_model.ground_truth` either. Add one of them, "
            f"or {WITHOUT}."
        )
    return answer


def _check_unicode(text: str, *, where: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}, field `{field}`: character {error.start} is half of a surrogate pair, which tokenizers do not "
            "accept. Repair the text."
        ) from None


def _show(value: Json) -> str:
    if value is None:
        return "nothing"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
