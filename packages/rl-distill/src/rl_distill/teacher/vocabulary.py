"""Comparison of the vocabularies of student and teacher.

A teacher that scores the student's token ids must have the same token at each id. The check reads `tokenizer.json` as
JSON with a size limit: no tokenizer is loaded, and no code from the folder runs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.files import preview, read_json
from rl_core.record_fields import converts_arguments

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece's symbol for a space."""


def text_rules(document: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the rules other than tokens that determine a text's ids, independent of notation.

    Decoders, padding, truncation and special tokens around a text are not included.
    """
    model = document["model"]
    vocab, merges = model["vocab"], model.get("merges") or ()
    options = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    options.setdefault("type", "BPE" if merges else None)
    return MappingProxyType(
        {
            "model": _plain(options),
            "merges": tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in merges),
            "scores": () if isinstance(vocab, dict) else tuple(float(item[1]) for item in vocab),
            "normalizer": _plain(document.get("normalizer")),
            "pre_tokenizer": _plain(document.get("pre_tokenizer")),
        }
    )


def _plain(rule: Json) -> Json:
    """Normalize a rule: absent, null, false and empty values are equal, and old names become the new ones."""
    if isinstance(rule, list):
        return [_plain(item) for item in rule]
    if not isinstance(rule, dict):
        return rule
    rule = dict(rule)
    if rule.get("type") == "ByteLevel":
        rule.setdefault("use_regex", True)
        rule.pop("trim_offsets", None)
    if rule.get("type") == "Metaspace":
        rule.setdefault("prepend_scheme", "always" if rule.get("add_prefix_space", True) else "never")
        rule.setdefault("split", True)
        rule = {name: value for name, value in rule.items() if name not in ("add_prefix_space", "str_rep")}
    plain = {name: _plain(value) for name, value in rule.items()}
    return {name: value for name, value in plain.items() if value is not None and value is not False and value != ""}


def token_bytes(tokens: Mapping[int, str], *, added: frozenset[int], decoder: Json, where: str) -> dict[int, bytes]:
    """Return the bytes that each token stands for within a text.

    Args:
        tokens: Text of each id, in the tokenizer's notation.
        added: Ids whose text is literal, whatever the decoder.
        decoder: The tokenizer's decoder, as JSON.
        where: Origin of the tokenizer, for messages.

    Raises:
        SettingsError: This decoder does not give tokens fixed bytes.
    """
    kinds = set(_decoder_kinds(decoder))
    of: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        octets = {letter: octet for octet, letter in enumerate(byte_letters())}
        of = partial(_byte_level, octets=octets)
    elif kinds & {"Metaspace", "ByteFallback"}:
        of = _sentence_piece
    elif kinds <= {"Fuse"} and kinds:
        of = _as_it_is
    else:
        raise SettingsError(
            f"{where} cannot be aligned with another tokenizer: its decoder must be ByteLevel, Metaspace, "
            f"ByteFallback or Fuse, which define the bytes of each token; found {', '.join(sorted(kinds)) or 'none'}. "
            "Use a teacher with the student's tokenizer."
        )
    return {index: _as_it_is(token) if index in added else of(token) for index, token in tokens.items()}


def byte_letters() -> str:
    """Return the letter that stands for each byte in byte-level vocabularies, in byte order.

    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {octet: chr(octet) for octet in printable}
    others = [octet for octet in range(256) if octet not in letters]
    letters |= {octet: chr(256 + number) for number, octet in enumerate(others)}
    return "".join(letters[octet] for octet in range(256))


def _byte_level(token: str, octets: Mapping[str, int]) -> bytes:
    """Return the bytes that a token's letters stand for; a token with other letters is literal."""
    try:
        return bytes(octets[letter] for letter in token)
    except KeyError:
        return _as_it_is(token)


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _as_it_is(token.replace(_SPACE, " "))


def _as_it_is(token: str) -> bytes:
    """Return a token's literal text; lone surrogates become bytes that no text contains."""
    return token.encode(errors="surrogatepass")


def _decoder_kinds(decoder: Json) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder.get("decoders") or [] for kind in _decoder_kinds(part)]
    return [str(decoder.get("type"))]


TOKENIZER = "tokenizer.json"
MAX_BYTES = 1 << 26
"""Size limit of `tokenizer.json`; Gemma's, with 262,144 tokens, has 33 MB."""
MAX_VALUES = 1 << 23
MAX_ID = 1 << 24
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer's tokens and rules.

    Attributes:
        tokens: Token of each id in the tokenizer's notation, e.g. `Ġa`, including added tokens. Embedding rows without
            a token are not included.
        added: Ids of tokens that match text literally, e.g. '<|im_end|>'.
        rules: Other rules that determine a text's ids, by name.
        decoder: The decoder from tokens to text, as JSON.
    """

    tokens: Mapping[int, str]
    added: frozenset[int]
    rules: Mapping[str, Json]
    decoder: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyDifference:
    """Differences of a teacher's vocabulary from the student's.

    Attributes:
        num_ids: Number of ids in the student's vocabulary.
        different: Ids at which the teacher has another token or none: (id, student's token, teacher's token or None).
        only_in_student: Tokens that the teacher's vocabulary lacks.
        only_in_teacher: Tokens that the student's vocabulary lacks; on their own, they are not a difference.
        rules: Descriptions of differing rules that change a text's ids.
    """

    num_ids: int
    different: tuple[tuple[int, str, str | None], ...] = ()
    only_in_student: tuple[str, ...] = ()
    only_in_teacher: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether every id of the student has the same token in the teacher, and text maps to the same ids."""
        return not self.different and not self.rules

    def described(self) -> str:
        """Describe the differences, the first few of each kind."""
        parts = []
        if self.different:
            few = [
                f"id {index}: student {_token(own)}, teacher {_token(other)}"
                for index, own, other in self.different[:NUM_SHOWN]
            ]
            parts.append(f"{len(self.different)} of {self.num_ids} ids differ ({_listed(few, len(self.different))})")
            for side, tokens in (("student", self.only_in_student), ("teacher", self.only_in_teacher)):
                if tokens:
                    names = [_token(token) for token in tokens[:NUM_SHOWN]]
                    parts.append(f"{len(tokens)} tokens are only in the {side} ({_listed(names, len(tokens))})")
        return "; ".join([*parts, *self.rules])


@converts_arguments
def compare_vocabularies(student_folder: Path, teacher_folder: Path) -> VocabularyDifference:
    """Compare the tokens of two model folders' tokenizers at each id of the student's.

    Raises:
        SettingsError: A folder's `tokenizer.json` is missing or invalid.
    """
    student, teacher = read_vocabulary(student_folder), read_vocabulary(teacher_folder)
    different = [
        (index, token, other)
        for index, token in sorted(student.tokens.items())
        if (other := teacher.tokens.get(index)) != token
    ]
    own, others = set(student.tokens.values()), set(teacher.tokens.values())
    return VocabularyDifference(
        num_ids=len(student.tokens),
        different=tuple(different),
        only_in_student=tuple(token for _, token in sorted(student.tokens.items()) if token not in others),
        only_in_teacher=tuple(token for _, token in sorted(teacher.tokens.items()) if token not in own),
        rules=tuple(_different_rules(student.rules, teacher.rules)),
    )


@converts_arguments
def check_same_vocabulary(student: Path, teacher: Path, *, teacher_name: str) -> None:
    """Check that a teacher has the student's token ids.

    Args:
        student: The policy's model folder.
        teacher: The teacher's model folder.
        teacher_name: Name of the teacher, for messages.

    Raises:
        SettingsError: The ids differ (the message names tokens), or a folder has no tokenizer.
    """
    difference = compare_vocabularies(student, teacher)
    if not difference.is_same:
        raise SettingsError(
            f"distillation.teachers.{teacher_name} must have the student's vocabulary, since it scores the student's "
            f"token ids, but {difference.described()}. Compared {student / TOKENIZER} with {teacher / TOKENIZER}. Use "
            'a teacher with the same tokenizer, or set distillation.other_tokenizer = "align".'
        )


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary of a model folder's tokenizer.

    Raises:
        SettingsError: `tokenizer.json` is missing or invalid.
    """
    file = folder / TOKENIZER
    document = _load(file)
    try:
        model, added = document["model"], document.get("added_tokens") or []
        tokens = dict(_model_tokens(model["vocab"]))
        found = {_checked_id(token["id"]): str(token["content"]) for token in added}
        rules, decoder = text_rules(document), document.get("decoder")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file} is not a supported tokenizer ({type(error).__name__}: {str(error)[:200]}). Expected an object "
            "with model.vocab and added_tokens, as the tokenizers library writes it."
        ) from None
    return Vocabulary(
        tokens=MappingProxyType(tokens | found),
        added=frozenset(found),
        rules=rules,
        decoder=decoder,
    )


def _load(file: Path) -> dict[str, Json]:
    """Load a folder's tokenizer, within the size limit."""
    if not file.is_file():
        raise SettingsError(
            f"{file} is missing, so the vocabularies of student and teacher cannot be compared. Create it with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    document = read_json(file, max_bytes=MAX_BYTES, max_values=MAX_VALUES, error=SettingsError)
    if not isinstance(document, dict):
        raise SettingsError(f"{file} must be a JSON object; found {type(document).__name__}.")
    return document


def _model_tokens(vocab: Json) -> Iterator[tuple[int, str]]:
    """Yield (id, token) from a mapping of tokens to ids, or from a list of [token, score]."""
    if isinstance(vocab, dict):
        ids = [_checked_id(index) for index in vocab.values()]
        if len(set(ids)) != len(ids):
            raise ValueError("model.vocab has two tokens with one id")
        yield from zip(ids, vocab, strict=True)
    else:
        for index, item in enumerate(vocab):
            yield index, str(item[0])


def _checked_id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_ID:
        raise ValueError(f"a token's id must be a whole number from 0 to {MAX_ID - 1}; found {ascii(value)[:40]}")
    return value


def _different_rules(student: Mapping[str, Json], teacher: Mapping[str, Json]) -> Iterator[str]:
    """Describe the differences in the other rules."""
    for name in student.keys() | teacher.keys():
        own, other = student.get(name), teacher.get(name)
        if own == other:
            continue
        if isinstance(own, tuple) and isinstance(other, tuple):
            first = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
            place = min(len(own), len(other)) if first is None else first
            where = f"at number {place}: student {_item(own, place)}, teacher {_item(other, place)}"
            yield f"the {name} differ ({len(own)} and {len(other)}; {where})"
        else:
            yield f"the {name} differs (student {preview(own, most=100)}, teacher {preview(other, most=100)})"


def _item(items: Sequence[object], place: int) -> str:
    return ascii(items[place]) if place < len(items) else "none"


def _token(token: str | None) -> str:
    return "none" if token is None else preview(token, most=40)


def _listed(few: Sequence[str], total: int) -> str:
    return ", ".join(few) + (", ..." if total > len(few) else "")
