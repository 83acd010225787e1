"""All prompts of some files, checked and tokenized before any model loads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import structlog
from annotated_types import Ge, Le
from numpy.typing import NDArray

from rl_core.data import ImageSpan, IntArray, Json, Prompt, Ragged
from rl_core.errors import DataError, SettingsError
from rl_core.images import ImageStore
from rl_core.record_fields import PositiveInt, converts_arguments, record, settings_record
from rl_rollout.engines.images import MAX_IMAGES
from rl_rollout.prompts.row_images import COLUMNS, PLACEHOLDER, ImageReader, RowImage, located, try_images
from rl_rollout.prompts.rows import Rows, open_rows
from rl_rollout.prompts.schema import Problem, read_problem
from rl_rollout.prompts.tokenizer import PromptTokenizer

CHUNK_ROWS = 256
"""Rows encoded at once, with their images in memory."""

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
        max_images: Maximum number of images in a prompt.
        image_folders: Folders whose images rows may name, besides the folder of their file.
        image_urls: Beginnings of URLs whose images rows may name, which are fetched and kept in the user's cache.
    """

    max_tokens: PositiveInt
    overlong: Literal["error", "drop"] = "error"
    plain_prompts: Literal["raw", "chat"] = "raw"
    requires_ground_truth: bool = True
    max_images: Annotated[int, Ge(1), Le(MAX_IMAGES)] = 16
    image_folders: tuple[Path, ...] = ()
    image_urls: tuple[str, ...] = ()


class PromptSet:
    """Prompts in file order. Tokens stay in memory; columns are read again for each prompt.

    Attributes:
        uids: Content hash and row number of each prompt.
        num_dropped: Number of rows omitted because they were too long.
        num_unplaced: Number of prompts with `<image>` in their text and no image, if the model takes images.
        fingerprint: Hash of all tokens, uids and settings of images. It must not change when a run resumes.
    """

    def __init__(
        self,
        files: Sequence[Rows],
        *,
        uids: Sequence[str],
        tokens: Ragged,
        rows: NDArray[np.int64],
        images: Sequence[tuple[ImageSpan, ...]] = (),
        readers: Sequence[ImageReader] = (),
        image_settings: str = "",
        num_unplaced: int = 0,
        options: PromptOptions,
    ) -> None:
        """Store what `load_prompts` read.

        Args:
            files: The opened files.
            uids: N uids.
            tokens: N rows of int32 tokens.
            rows: [N, 2] index into files, and row in that file.
            images: The images among the tokens of each prompt; empty if there are none.
            readers: What reads the images of each file's rows; by default, as for a model of text.
            image_settings: Digest of the settings of the image processor; empty without images.
            num_unplaced: See the attribute.
            options: Options under which the rows were read.
        """
        self._files = tuple(files)
        self._readers = tuple(readers) or tuple(_reader_of(rows, options) for rows in files)
        self._images = tuple(images) or ((),) * len(uids)
        self._store: ImageStore | None = None
        self._tokens = tokens
        self._rows = rows
        self._options = options
        self.num_unplaced = num_unplaced
        self.uids = tuple(uids)
        self.num_dropped = sum(map(len, files)) - len(self.uids)
        digest = blake2b("\n".join(self.uids).encode(), digest_size=16)
        digest.update(tokens.offsets.tobytes())
        digest.update(tokens.values.tobytes())
        digest.update(image_settings.encode())
        self.fingerprint = digest.hexdigest()

    def __repr__(self) -> str:
        return f"PromptSet({len(self)} prompts)"

    @property
    def longest(self) -> int:
        """Number of tokens in the longest prompt."""
        return int(self._tokens.lengths.max())

    @property
    def num_images(self) -> int:
        """Number of images in all prompts."""
        return sum(map(len, self._images))

    @property
    def first_with_image(self) -> int | None:
        """Index of the first prompt with an image; None if there is none."""
        return next((index for index, images in enumerate(self._images) if images), None)

    def keep_images(self, store: ImageStore) -> None:
        """Put the images of each prompt that is taken from now on into a store, where engine and learner find them."""
        self._store = store

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
        where, spans = self._files[file].locate(row), self._images[index]
        problem, images = _read(self._files[file][row], self._readers[file], self._options, where=where)
        if [one.digest for one in images] != [span.digest for span in spans]:
            raise DataError(f"{where}: its images have changed since the file was read. Start the run again.")
        if self._store is not None:
            for image in images:
                self._store.put(image.data)
        return Prompt(
            uid=self.uids[index] + uid_suffix,
            input_ids=self._tokens[index],
            messages=problem.messages,
            data_source=problem.data_source,
            ground_truth=problem.ground_truth,
            columns=problem.columns,
            images=spans,
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
    readers = [_reader_of(rows, options, sees_images=tokenizer.sees_images) for rows in opened]
    uids: list[str] = []
    tokens: list[NDArray[np.int32]] = []
    images: list[tuple[ImageSpan, ...]] = []
    places: list[tuple[int, int]] = []
    num_rows = num_unplaced = 0
    for file, rows in enumerate(opened):
        for row, one in enumerate(_encoded(rows, readers[file], tokenizer, options)):
            if _fits(one, options, where=rows.locate(row)):
                uids.append(f"{one.problem.digest()}-{num_rows}")
                tokens.append(one.ids)
                images.append(one.images)
                if tokenizer.sees_images and not one.images:
                    num_unplaced += PLACEHOLDER in f"{one.problem.text} {one.problem.messages}"
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
        images=images,
        readers=readers,
        image_settings=tokenizer.image_settings if any(images) else "",
        num_unplaced=num_unplaced,
        options=options,
    )
    log.info("prompts_loaded", num_prompts=len(prompts), num_dropped=prompts.num_dropped, files=[str(f) for f in files])
    return prompts


@record
class _EncodedRow:
    """A row as tokens, with the images among them."""

    problem: Problem
    ids: IntArray
    images: tuple[ImageSpan, ...]


def _reader_of(rows: Rows, options: PromptOptions, *, sees_images: bool = False) -> ImageReader:
    return ImageReader(
        rows.path,
        folders=options.image_folders,
        urls=options.image_urls,
        max_images=options.max_images,
        columns=COLUMNS if sees_images else COLUMNS[:1],
        plain_as_message=options.plain_prompts == "chat",
    )


def _read(
    row: Mapping[str, Json], reader: ImageReader, options: PromptOptions, *, where: str
) -> tuple[Problem, tuple[RowImage, ...]]:
    """Read a row and its images. Plain text stays raw or becomes one user message, as the options say."""
    columns, images = reader.read(row, where=where)
    problem = read_problem(columns, where=where, requires_ground_truth=options.requires_ground_truth)
    if problem.text is not None and options.plain_prompts == "chat":
        problem = replace(problem, messages=({"role": "user", "content": problem.text},), text=None)
    return problem, images


def _encoded(
    rows: Rows, reader: ImageReader, tokenizer: PromptTokenizer, options: PromptOptions
) -> Iterator[_EncodedRow]:
    """Yield each row with its tokens, encoded in chunks."""
    remaining = enumerate(rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        places = [rows.locate(row) for row, _ in chunk]
        read = [_read(columns, reader, options, where=where) for where, (_, columns) in zip(places, chunk, strict=True)]
        try_images(image for _, images in read for image in images)
        texts = [problem.text for problem, _ in read if problem.text is not None]
        rendered = [
            _rendered(problem, images, tokenizer, where=f"{where}, field `prompt`")
            for where, (problem, images) in zip(places, read, strict=True)
            if problem.text is None
        ]
        plain = iter(tokenizer.encode(texts, add_special_tokens=True))
        chats = iter(tokenizer.encode(rendered, add_special_tokens=False))
        for where, (problem, images) in zip(places, read, strict=True):
            ids = np.asarray(next(chats if problem.text is None else plain), dtype=np.int32)
            yield _EncodedRow(problem=problem, ids=ids, images=_spans(ids, images, tokenizer, where=where))


def _rendered(problem: Problem, images: Sequence[RowImage], tokenizer: PromptTokenizer, *, where: str) -> str:
    """Render a row's messages, with as many placeholders for each image as it needs."""
    text = tokenizer.render(problem.messages, where=where)
    if not images:
        return text
    with located(where):
        return tokenizer.image_processor.expanded(text, [image.data for image in images])


def _spans(
    ids: IntArray, images: Sequence[RowImage], tokenizer: PromptTokenizer, *, where: str
) -> tuple[ImageSpan, ...]:
    if not images:
        token_id = tokenizer.image_token_id
        if token_id is not None and (ids == token_id).any():
            raise DataError(
                f"{where}, field `prompt`: token {token_id} stands for an image, and the row has none. Remove its "
                "text, or add the image."
            )
        return ()
    with located(f"{where}, field `prompt`"):
        return tokenizer.image_processor.spans(
            ids, [image.digest for image in images], [image.data for image in images]
        )


def _fits(row: _EncodedRow, options: PromptOptions, *, where: str) -> bool:
    if not len(row.ids):
        raise DataError(f"{where}, field `prompt`: the prompt has no tokens; expected at least one.")
    limit = options.max_tokens
    if len(row.ids) <= limit:
        return True
    if options.overlong == "drop":
        return False
    of_images = f", {sum(span.length for span in row.images)} of them for images" if row.images else ""
    raise DataError(
        f"{where}, field `prompt`: {len(row.ids)} tokens{of_images}, more than max_tokens = {limit}. "
        'Raise prompts.max_tokens, shorten the prompt, or set prompts.overlong = "drop".'
    )
