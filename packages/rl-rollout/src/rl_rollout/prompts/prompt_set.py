"""All prompts of some files, checked and tokenized before any model loads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from rl_core.data import Json, Prompt, Ragged
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import PositiveInt, converts_arguments, settings_record
from rl_rollout.prompts.rows import Rows, open_rows
from rl_rollout.prompts.schema import Problem, read_problem
from rl_rollout.prompts.tokenizer import PromptTokenizer

CHUNK_ROWS = 1024

log = structlog.get_logger(__name__)


@settings_record
class PromptOptions:
    """How to read and tokenize rows.

    Attributes:
        max_tokens: Maximum prompt length in tokens, including the chat template.
        overlong: What to do with a prompt above `max_tokens`: "error", or "drop" and count it.
        plain_prompts: How to tokenize a prompt that is plain text: "raw", exactly as it stands, or "chat", as a user
            message.
        requires_ground_truth: Refuse rows without ground truth.
    """

    max_tokens: PositiveInt
    overlong: Literal["error", "drop"] = "error"
    plain_prompts: Literal["raw", "chat"] = "raw"
    requires_ground_truth: bool = True


class PromptSet:
    """Prompts in file order. Tokens stay in memory; columns are read again for each prompt.

    Attributes:
        uids: Content hash and row number of each prompt.
        num_dropped: Number of rows omitted because they were too long.
        fingerprint: Hash of all tokens and uids. It must not change when a run resumes.
    """

    def __init__(
        self,
        files: Sequence[Rows],
        *,
        uids: Sequence[str],
        tokens: Ragged,
        rows: NDArray[np.int64],
        options: PromptOptions,
    ) -> None:
        """Store what `load_prompts` read.

        Args:
            files: The opened files.
            uids: N uids.
            tokens: N rows of int32 tokens.
            rows: [N, 2] index into files, and row in that file.
            options: Options under which the rows were read.
        """
        self._files = tuple(files)
        self._tokens = tokens
        self._rows = rows
        self._options = options
        self.uids = tuple(uids)
        self.num_dropped = sum(map(len, files)) - len(self.uids)
        digest = blake2b("\n".join(self.uids).encode(), digest_size=16)
        digest.update(tokens.offsets.tobytes())
        digest.update(tokens.values.tobytes())
        self.fingerprint = digest.hexdigest()

    def __repr__(self) -> str:
        return f"PromptSet({len(self)} prompts)"

    @property
    def longest(self) -> int:
        """Number of tokens in the longest prompt."""
        return int(self._tokens.lengths.max())

    def __len__(self) -> int:
        return len(self.uids)

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over the prompts in file order, for validation."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        """Return a prompt by its index, from 0."""
        return self.prompt(index)

    def prompt(self, index: int, *, uid_suffix: str = "") -> Prompt:
        """Return a prompt by its index, with a suffix appended to its uid."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt index {index} is not in 0..{len(self) - 1}")
        file, row = self._rows[index].tolist()
        problem = _read(self._files[file][row], self._options, where=self._files[file].locate(row))
        return Prompt(
            uid=self.uids[index] + uid_suffix,
            input_ids=self._tokens[index],
            messages=problem.messages,
            data_source=problem.data_source,
            ground_truth=problem.ground_truth,
            columns=problem.columns,
        )


@converts_arguments
def load_prompts(files: Sequence[Path], tokenizer: PromptTokenizer, options: PromptOptions) -> PromptSet:
    """Read, check and tokenize every row of the files, in their order.

    Raises:
        DataError: A file or row is invalid. The message names file, row and field.
        SettingsError: No file is given.
    """
    if not files:
        raise SettingsError("no prompt file is given; expected at least one.")
    opened = [open_rows(Path(path)) for path in files]
    uids: list[str] = []
    tokens: list[NDArray[np.int32]] = []
    places: list[tuple[int, int]] = []
    num_rows = 0
    for file, rows in enumerate(opened):
        for row, (problem, ids) in enumerate(_encoded(rows, tokenizer, options)):
            if _fits(ids, options, where=rows.locate(row)):
                uids.append(f"{problem.digest()}-{num_rows}")
                tokens.append(np.asarray(ids, dtype=np.int32))
                places.append((file, row))
            num_rows += 1
    if not uids:
        raise DataError(
            f"all {num_rows} rows of {', '.join(str(rows.path) for rows in opened)} are longer than "
            f"max_tokens = {options.max_tokens}. Raise it."
        )
    prompts = PromptSet(
        opened,
        uids=uids,
        tokens=Ragged.from_rows(tokens, dtype=np.int32),
        rows=np.asarray(places, dtype=np.int64),
        options=options,
    )
    log.info("prompts_loaded", num_prompts=len(prompts), num_dropped=prompts.num_dropped, files=[str(f) for f in files])
    return prompts


def _read(row: Mapping[str, Json], options: PromptOptions, *, where: str) -> Problem:
    """Read a row. Plain text stays raw or becomes one user message, as the options say."""
    problem = read_problem(row, where=where, requires_ground_truth=options.requires_ground_truth)
    if problem.text is None or options.plain_prompts == "raw":
        return problem
    return replace(problem, messages=({"role": "user", "content": problem.text},), text=None)


def _encoded(rows: Rows, tokenizer: PromptTokenizer, options: PromptOptions) -> Iterator[tuple[Problem, list[int]]]:
    """Yield each row with its tokens, encoded in chunks."""
    remaining = enumerate(rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        problems = [_read(columns, options, where=rows.locate(row)) for row, columns in chunk]
        texts = [problem.text for problem in problems if problem.text is not None]
        rendered = [
            tokenizer.render(problem.messages, where=f"{rows.locate(row)}, field `prompt`")
            for (row, _), problem in zip(chunk, problems, strict=True)
            if problem.text is None
        ]
        plain = iter(tokenizer.encode(texts, add_special_tokens=True))
        chats = iter(tokenizer.encode(rendered, add_special_tokens=False))
        yield from ((problem, next(chats) if problem.text is None else next(plain)) for problem in problems)


def _fits(ids: Sequence[int], options: PromptOptions, *, where: str) -> bool:
    if not ids:
        raise DataError(f"{where}, field `prompt`: the prompt has no tokens; expected at least one.")
    limit = options.max_tokens
    if len(ids) <= limit:
        return True
    if options.overlong == "drop":
        return False
    raise DataError(
        f"{where}, field `prompt`: {len(ids)} tokens, more than max_tokens = {limit}. "
        'Raise prompts.max_tokens, shorten the prompt, or set prompts.overlong = "drop".'
    )
