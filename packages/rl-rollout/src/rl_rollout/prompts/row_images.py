"""The images of a row: in parts of its messages, in a column, or at `<image>` in its text."""

import base64
import binascii
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import url2pathname

from rl_core.data import Json
from rl_core.errors import DataError, SettingsError
from rl_core.files import preview, read_plain, run_trial
from rl_core.images import MAX_IMAGE_BYTES
from rl_rollout.prompts.fetched_images import check_places, fetch_image

COLUMNS = ("images", "image")
"""Columns that may have the images of a row; the first with any is used."""

PLACEHOLDER = "<image>"
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a message's parts that are images."""

OWN_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys with which qwen-vl-utils sets the size of one image."""

SOURCES = ("bytes", "image", "path", "url", "image_url")
"""Keys of an object that has an image, in the order of preference."""

TRIAL = Path(__file__).with_name("image_trial.py")
IMAGES_PER_CPU_S = 20

Message = dict[str, Json]


class RowImage(NamedTuple):
    """An encoded image of a row.

    Attributes:
        digest: SHA-256 of its bytes, in hexadecimal.
        data: Its bytes.
        where: File, row and field, for messages.
        kept: File in the user's cache if it was fetched.
    """

    digest: str
    data: bytes
    where: str
    kept: Path | None = None


class RowWithImages(NamedTuple):
    """A row without the bytes of its images.

    Attributes:
        columns: The row. Each image part of a message is `{"type": "image", "digest": ...}`, and the column of images
            has their digests.
        images: The images, in the order of the messages.
    """

    columns: Mapping[str, Json]
    images: tuple[RowImage, ...] = ()


class ImageReader:
    """Reads the images of a file's rows.

    Images are bytes in the file, base64 in a `data:` URL, files in the file's folder or another allowed folder, or
    fetched from an allowed URL.
    """

    def __init__(
        self,
        file: Path,
        *,
        folders: Sequence[Path] = (),
        urls: Sequence[str] = (),
        max_images: int,
        columns: Sequence[str] = COLUMNS,
        plain_as_message: bool = False,
    ) -> None:
        """Set what may be read.

        Args:
            file: The file or folder of the rows. Paths of images are relative to its folder.
            folders: Other folders whose images may be read.
            urls: Beginnings of URLs that may be fetched.
            max_images: Maximum number of images in a row.
            columns: Columns that may have images.
            plain_as_message: Make a user message of a plain prompt with images.

        Raises:
            SettingsError: A beginning of URLs is none.
        """
        check_places(urls)
        self._urls = tuple(urls)
        self._columns = tuple(columns)
        self._plain_as_message = plain_as_message
        self._folder = file if file.is_dir() else file.parent
        self._allowed = tuple(Path(os.path.realpath(one)) for one in (self._folder, *folders))
        self._max_images = max_images

    def read(self, row: Mapping[str, Json], *, where: str) -> RowWithImages:
        """Find a row's images, and read them.

        Parts of type "image" without a source of their own take the images of the column, in order. Without such parts,
        the column's images replace `<image>` in the text, or precede the first user's text.

        Raises:
            DataError: An image cannot be read, or the column has another number of images than the messages need.
        """
        columns = [name for name in self._columns if row.get(name)]
        if len(columns) > 1:
            raise DataError(
                f"{where}: a row's images must be in one column; found {' and '.join(columns)}. Remove one."
            )
        if row.get("videos"):
            raise DataError(f"{where}, field `videos`: videos are not supported. Remove them, or the row.")
        column = columns[0] if columns else None
        listed = [] if column is None else _listed(row[column])
        messages = row.get("prompt")
        if isinstance(messages, str) and listed and self._plain_as_message:
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            if not listed:
                return RowWithImages(row)
            raise DataError(
                f"{where}, field `prompt`: a prompt with images must be a list of messages. Write messages, or set "
                'prompts.plain_prompts = "chat".'
            )
        if not listed and not any(isinstance(one.get("content"), list) for one in messages):
            return RowWithImages(row)
        messages = [{**one, "content": _parts(one.get("content"))} for one in messages]
        if listed and not any(map(_is_image, _all_parts(messages))):
            messages = _placed(messages, len(listed))
        places = list(_image_places(messages))
        self._check_count(len(places), where=where)
        images: list[RowImage] = []
        of_column: list[int] = []
        for field, parts, place in places:
            source = _source(parts[place], where=f"{where}, field `{field}`")
            if source is None and len(of_column) < len(listed):
                field = f"{column}[{len(of_column)}]"
                source = _source(listed[len(of_column)], where=f"{where}, field `{field}`")
                of_column.append(len(images))
            images.append(self._read(source, where=f"{where}, field `{field}`"))
            parts[place] = {"type": "image", "digest": images[-1].digest}
        if len(of_column) < len(listed):
            raise DataError(
                f"{where}, field `{column}`: {len(listed)} images, but the messages have places for {len(of_column)}. "
                f"Add a part of type 'image' for each, or {PLACEHOLDER!r} in the text."
            )
        if not images:
            return RowWithImages({**row, "prompt": list(map(_with_text, messages))})
        digests = {} if column is None else {column: [images[index].digest for index in of_column]}
        return RowWithImages({**row, "prompt": messages, **digests}, tuple(images))

    def _check_count(self, count: int, *, where: str) -> None:
        if count > self._max_images:
            raise DataError(
                f"{where}, field `prompt`: {count} images, more than prompts.max_images = {self._max_images}. "
                "Raise it, or remove some."
            )

    def _read(self, source: Json | bytes, *, where: str) -> RowImage:
        if source is None:
            columns = " or ".join(f"`{name}`" for name in COLUMNS)
            raise DataError(
                f"{where}: a place for an image without one. Name the image there, or in the column {columns}."
            )
        data, kept = (source, None) if isinstance(source, bytes) else self._named(source, where=where)
        if not 0 < len(data) <= MAX_IMAGE_BYTES:
            raise DataError(f"{where}: an image must have 1 to {MAX_IMAGE_BYTES} bytes; found {len(data)}.")
        shown = where if kept is None else f"{where}, {preview(source)}"
        return RowImage(sha256(data).hexdigest(), data, shown, kept)

    def _named(self, name: Json, *, where: str) -> tuple[bytes, Path | None]:
        """Return the bytes of an image that a path or URL names, and the file that keeps them if they were fetched."""
        if not isinstance(name, str):
            raise DataError(f"{where}: expected the bytes or the path of an image; found {preview(name)}.")
        scheme, colon, rest = name.partition(":")
        if colon and scheme == "data":
            _, is_base64, encoded = rest.partition("base64,")
            if not is_base64:
                raise DataError(f"{where}: a `data:` URL must have base64; found {preview(name)}.")
            try:
                return base64.b64decode(encoded, validate=True), None
            except binascii.Error as error:
                raise DataError(f"{where}: a `data:` URL must have base64 ({error}).") from None
        if rest.startswith("//") and scheme != "file":
            with located(where):
                return fetch_image(name, self._urls)
        name = url2pathname(rest.removeprefix("//")) if scheme == "file" else name
        path = Path(os.path.realpath(self._folder / name))
        if not any(path.is_relative_to(folder) for folder in self._allowed):
            raise DataError(
                f"{where}: {path} is not in {self._allowed[0]}. Add its folder to prompts.image_folders, or move the "
                "image."
            )
        with located(where):
            return read_plain(path, max_bytes=MAX_IMAGE_BYTES), None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put file, row and field before the message of a refusal."""
    try:
        yield
    except (DataError, SettingsError) as error:
        raise DataError(f"{where}: {error}") from error


def try_images(images: Iterable[RowImage]) -> None:
    """Decode images once in a child process, which a damaged one may crash. Fetched ones are only kept if they decode.

    Raises:
        DataError: An image cannot be decoded. The message names file, row and field.
    """
    distinct = {one.digest: one for one in images}
    if not distinct:
        return
    try:
        _try(distinct)
    except DataError:
        for one in distinct.values():
            if one.kept is not None:
                one.kept.unlink(missing_ok=True)
        raise


def _try(distinct: Mapping[str, RowImage]) -> None:
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        paths = {one.digest: Path(folder) / one.digest for one in distinct.values()}
        for digest, path in paths.items():
            path.write_bytes(distinct[digest].data)
        run_trial(
            TRIAL,
            {"files": [[str(path), distinct[digest].where] for digest, path in paths.items()]},
            files=list(paths.values()),
            libraries=["pillow"],
            extra_cpu_s=len(paths) // IMAGES_PER_CPU_S,
            what="a prompt",
        )


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _parts(content: Json) -> Json:
    """Return content as a list of parts; anything else than text and a list stays."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    # Arrow adds every key of the column to each part.
    return [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
        for part in content
    ]


def _all_parts(messages: Iterable[Mapping[str, Json]]) -> Iterator[Json]:
    return (part for one in messages if isinstance(one.get("content"), list) for part in one["content"])


def _image_places(messages: Sequence[Message]) -> Iterator[tuple[str, list[Json], int]]:
    """Yield the field of each image, the list that has its part, and the part's index there."""
    for index, message in enumerate(messages):
        parts = message["content"]
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            if _is_image(part):
                yield f"prompt[{index}].content[{place}]", parts, place


def _is_image(part: Json) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _source(value: Any, *, where: str) -> Json | bytes:
    """Return the bytes, path or URL in an object that has an image; None if it has none.

    Raises:
        DataError: The object sets a size, which would give other tokens than the model's processor.
    """
    while isinstance(value, dict):  # such as {"type": "image_url", "image_url": {"url": ...}}
        if sized := [key for key in OWN_SIZES if value.get(key) is not None]:
            raise DataError(
                f"{where}: {sized[0]} of one image is not supported. Resize the image, or set the sizes of all in the "
                "model's preprocessor_config.json."
            )
        key = next((key for key in SOURCES if value.get(key) is not None), None)
        value = None if key is None else value[key]
        if key == "bytes" and isinstance(value, str):  # as JSON has them
            value = f"data:;base64,{value}"
    return bytes(value) if isinstance(value, bytearray) else value


def _placed(messages: list[Message], count: int) -> list[Message]:
    """Put parts for images at the placeholders in the text, or before the first user's text."""
    if not any(PLACEHOLDER in part.get("text", "") for part in _all_parts(messages) if isinstance(part, dict)):
        first = next((one for one in messages if one.get("role") == "user" and isinstance(one["content"], list)), None)
        images = [{"type": "image"}] * count
        return [{**one, "content": [*images, *one["content"]]} if one is first else one for one in messages]
    return [
        {**one, "content": [piece for part in one["content"] for piece in _split(part)]}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]


def _split(part: Json) -> Iterator[Json]:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        yield part
        return
    for index, text in enumerate(part["text"].split(PLACEHOLDER)):
        if index:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _with_text(message: Message) -> Message:
    """Return a message whose content is text, if all of its parts are; templates of text expect it."""
    parts = message["content"]
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )
    return {**message, "content": "".join(part["text"] for part in parts)} if is_text else message
