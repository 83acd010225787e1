"""Demonstrations as token sequences: conversations in the policy's chat template, or prompts with answers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from rl_core import Batch, Ragged, RowKey
from rl_core.data import IntArray, encodable_json
from rl_core.errors import DataError
from rl_core.files import preview
from rl_core.terminal_text import counted
from rl_rollout.engines import end_token_ids
from rl_rollout.prompts import PromptTokenizer, open_rows
from rl_sync_trainer.sft.settings import SftSettings
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.commands.train import Checked
from rl_trainer_parts.rollouts.inputs import check_vocabulary, read_tokenizer

CHUNK_ROWS = 1024
"""Sequences encoded at once."""

INSTEAD = 'Use another template, or the columns of prompts and answers, such as sft.columns = ["prompt", "answer"].'

IMAGE_COLUMNS = ("images", "image")
FORMS: dict[type, str] = {str: "text", list: "messages"}
KINDS: tuple[tuple[tuple[type, ...], ...], ...] = ((), ((list,),), ((str, list), (str,)))
"""What each of no, one or two columns may hold."""

Texts = list[tuple[str, bool]]
"""The texts of a sequence, each with whether it is trained; each is encoded alone, as a response to its prompt is."""


class SftInputs(NamedTuple):
    """Inputs of supervised training, checked.

    Attributes:
        tokenizer: The policy's tokenizer.
        train: Demonstrations to train on; see `read_demonstrations`.
        validation: Demonstrations whose loss is measured, if any.
        num_images: Demonstrations have none.
    """

    tokenizer: PromptTokenizer
    train: Batch
    validation: Batch | None
    num_images: int = 0


def check_sft(settings: SftSettings, problems: Iterable[str]) -> Checked[SftSettings]:
    """Check supervised training, given problems that are known already, and read its demonstrations.

    Raises:
        SettingsError: A setting is impossible.
        DataError: A user's file cannot be used.
    """
    check_settings(settings, problems)
    tokenizer, held_out = read_tokenizer(settings), settings.prompts.validation
    check_vocabulary(settings, tokenizer)
    train, num_dropped = read_demonstrations(settings.prompts.train, tokenizer, settings)
    validation = None
    if held_out is not None:
        validation, more = read_demonstrations(held_out, tokenizer, settings)
        num_dropped += more
    settings, mask, size = settings.resolved(len(train)), train.ragged("loss_mask"), settings.sft.batch_size
    rows = f"{len(mask)} demonstrations of at most {mask.lengths.max()} tokens, {mask.values.mean():.0%} trained"
    steps = f"{settings.trainer.steps} steps of {size}, {settings.trainer.steps / -(-len(mask) // size):.2f} epochs"
    were = counted(num_dropped, "demonstration is", "demonstrations are")
    note = f"{were} dropped, because they have more tokens than prompts.max_tokens = {settings.prompts.max_tokens}"
    return settings, SftInputs(tokenizer, train, validation), (rows, steps), (note,) if num_dropped else ()


def read_demonstrations(path: Path, tokenizer: PromptTokenizer, settings: SftSettings) -> tuple[Batch, int]:
    """Read and tokenize a file.

    Returns:
        A batch with `input_ids` and `loss_mask`, which is True at trained tokens, and the number of sequences that were
        dropped because they are too long.

    Raises:
        DataError: A row cannot be used; the message names file, row and column.
    """
    rows, limit, is_strict = open_rows(path), settings.prompts.max_tokens, settings.prompts.overlong == "error"
    num_dropped = 0
    ends, found = {*end_token_ids(settings.policy.path), tokenizer.eos_token_id}, list[IntArray]()
    begin = tokenizer.decode(tokenizer.encode([""], add_special_tokens=True), skip_special_tokens=False)[0]
    read = partial(_sequences, tokenizer=tokenizer, settings=settings, begin=begin)
    remaining = (one for row, columns in enumerate(rows) for one in read(columns, where=rows.locate(row)))
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        encoded = iter(tokenizer.encode([text for _, parts in chunk for text, _ in parts], add_special_tokens=False))
        for where, parts in chunk:
            pairs = [pair for _, trained in parts for pair in _marked(next(encoded), ends if trained else None, where)]
            if len(pairs) > limit and is_strict:
                advice = 'Raise it, or set prompts.overlong = "drop".'
                raise DataError(f"{where}: {len(pairs)} tokens, more than prompts.max_tokens = {limit}. {advice}")
            found += [np.asarray(pairs, dtype=np.int32)] if len(pairs) <= limit else []
            num_dropped += len(pairs) > limit
    if not found:
        raise DataError(f"all rows of {path} are longer than prompts.max_tokens = {limit}. Raise it.")
    ids, mask = (Ragged.from_rows([pairs[:, place] for pairs in found], dtype=np.int32) for place in range(2))
    columns = {"input_ids": ids, "loss_mask": Ragged(mask.values.astype(np.bool_), mask.offsets)}
    return Batch([RowKey(str(number), 0, 0) for number in range(len(found))], columns), num_dropped


def _sequences(
    row: Mapping[str, Any], *, tokenizer: PromptTokenizer, settings: SftSettings, begin: str, where: str
) -> Iterator[tuple[str, Texts]]:
    """Yield the texts of each of a row's sequences, after `where`; a conversation may need several."""
    if images := [name for name in IMAGE_COLUMNS if row.get(name)]:
        raise DataError(f"{where}, column {images[0]!r}: images are not supported. Remove them, or the row.")
    row, columns = encodable_json(row), settings.sft.columns
    render = partial(tokenizer.render, where=where, tools=_tools(row.get("tools") or [], where))
    values: list[Any] = [row.get(name) for name in columns]
    match values:
        case [_, [{"role": "assistant", "content": str(answer), **more}]] if {*map(type, more.values())} <= {NoneType}:
            values[1] = answer  # a completion as TRL's conversational data sets have it
    for name, value, kinds in zip(columns, values, KINDS[len(columns)], strict=True):
        if not value or not isinstance(value, kinds):
            expected = " or ".join(FORMS[kind] for kind in kinds)
            found = preview(value) if name in row else f"no such column in {[*row]}"
            raise DataError(f"{where}, column {name!r} (sft.columns): expected {expected}; found {found}.")
    first, *rest = values
    if not rest:
        yield from ((where, texts) for texts in _conversation(_messages(first, where), render, where))
        return
    (answer,), end = rest, tokenizer.wrapped.eos_token or ""
    if isinstance(first, str) and settings.prompts.plain_prompts == "raw":
        prompt = begin + first
    else:
        prompt = render(_messages([{"role": "user", "content": first}] if isinstance(first, str) else first, where))
    yield where, [(prompt, False), (answer.removesuffix(end) + end, True)]


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Check messages, and leave out the keys without a value, which Arrow adds to each message of a column."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and one.get("role") for one in value):
        raise DataError(f"{where}: expected messages with role and content, found {preview(value, most=60)}.")
    contents = (message.get("content") for message in value)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if others := [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text")]:
        problem = f"expected message parts of the type 'text'; found {preview(others[0])}"
        raise DataError(f"{where}: {problem}. Images are not supported. Remove the part, or the row.")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Return schemas of tools, which may be JSON."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if isinstance(tools, list) and all(isinstance(one, dict) for one in tools):
        return tools
    raise DataError(f"{where}, column 'tools': expected a list of schemas, or its JSON; found {preview(value)}.")


def _conversation(messages: list[dict[str, Any]], render: Callable[..., str], where: str) -> list[Texts]:
    """Return one sequence, and a further one for each turn whose context does not continue the sequence before it.

    A template may render earlier turns differently, for example without their reasoning. So each turn is trained after
    exactly the context that the policy sees when it answers there.
    """
    sequences: list[Texts] = []
    text = ""
    for turn in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        if not turn or messages[turn - 1]["role"] == "assistant":
            raise DataError(f"{where}: message {turn + 1} is the assistant's; expected another role before it.")
        context, whole = render(messages[:turn]), render(messages[: turn + 1], add_generation_prompt=False)
        if not whole.startswith(context):
            problem = "does not continue the prompt that the policy answers"
            raise DataError(f"{where}: in the chat template, the assistant's message {turn + 1} {problem}. {INSTEAD}")
        if not sequences or not context.startswith(text):
            sequences.append([])
            text = ""
        weight = messages[turn].get("weight", 1)
        if weight not in (0, 1):
            raise DataError(f"{where}: the weight of message {turn + 1} must be 0 or 1; found {preview(weight)}.")
        sequences[-1] += [(context[len(text) :], False), (whole[len(context) :], weight == 1)]
        text = whole
    trained = [texts for texts in sequences if any(is_trained for _, is_trained in texts)]
    if not trained:
        problem = "no message has the role assistant and a weight other than 0"
        raise DataError(f"{where}: {problem}, so nothing can be trained. Remove the row.")
    return trained


def _marked(ids: list[int], ends: set[int | None] | None, where: str) -> list[tuple[int, bool]]:
    """Return each token with whether it is trained: those up to the last end token; none if `ends` is None."""
    last = max((place for place, token in enumerate(ids) if ends and token in ends), default=-1)
    if ends and last < 0:
        raise DataError(f"{where}: no end token ends the trained text. {INSTEAD}")
    return [(token, place <= last) for place, token in enumerate(ids)]
