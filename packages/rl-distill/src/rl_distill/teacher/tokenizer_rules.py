"""Rules of a `tokenizer.json` other than its tokens: how text maps to ids, and the bytes of each token."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from rl_core.data import Json
from rl_core.errors import SettingsError

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
