"""Secret settings, which are read from the environment at use and never written to files.

Secrets are values below `headers` and `env`, values with names such as `api_key` or `password`, and passwords and keys
in URLs. A reference such as `"$NAME"` or `"Bearer $NAME"` names an environment variable; any other value is a literal
secret.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from rl_core.errors import SettingsError

REDACTED = "(redacted)"
"""Replaces a literal secret in written or displayed text."""

MIN_HIDDEN = 6
"""Minimum length of a value that is hidden in text; shorter ones, such as "1", would match by chance."""

_TABLES = ("headers", "env")
_NAME = re.compile(
    r"(?:.*[_-])?(?:api|access|owner|private|secret|signing)[_-]?key(?:[_-]id)?"
    r"|(?:.*[_-])?(?:secret|password|passwd|passphrase|credentials?|authorization|cookie)s?"
    r"|(?:(?:.*[_-])?(?:api|access|auth|bearer|hf|session|refresh)[_-])?token",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"((?:[A-Za-z][A-Za-z-]* )?)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_IN_URL = re.compile(
    r"(?P<user>://[^/?#\s:@]*:)(?P<password>[^/?#\s]+)(?=@)|(?P<key>[?&](?P<name>[\w-]+)=)(?P<value>[^&#\s]+)"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
ValueT = TypeVar("ValueT")


def resolve_secrets(values: ValueT, *, where: str) -> ValueT:
    """Return the settings with every secret's reference replaced by its environment variable.

    Args:
        values: Tables and lists of plain values; text outside of secrets is unchanged, dollar signs included.
        where: Name of the settings in error messages.

    Raises:
        SettingsError: A variable is not set.
    """

    def resolved(name: str, text: str) -> str:
        match = _REFERENCE.fullmatch(text)
        if match is None:
            return text
        variable = match[2] or match[3]
        if variable not in os.environ:
            raise SettingsError(
                f"{where}: {name} refers to the environment variable {variable}, which is not set. Set it in the "
                "environment that starts the run."
            )
        return match[1] + os.environ[variable]

    return cast("ValueT", _replaced(values, "", resolved, is_secret=False))


def redact(values: ValueT, *, keep_references: bool = True) -> ValueT:
    """Return the settings without literal secrets, safe to write and display.

    Args:
        values: Tables and lists of plain values.
        keep_references: False also replaces references, so that comparisons see only the names of secrets.
    """

    def redacted(_: str, text: str) -> str:
        return text if keep_references and _REFERENCE.fullmatch(text) else REDACTED

    return cast("ValueT", _replaced(values, "", redacted, is_secret=False))


def redact_option(name: str, value: Any) -> Any:
    """Return one option's value, redacted for a message."""
    return redact({name: value})[name]


def hide(text: str, values: Any) -> str:
    """Return external text, such as an error, without the secrets in these settings."""
    for secret in sorted(set(_secrets(values)), key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def check_headers(headers: Mapping[str, Any], *, where: str) -> None:
    """Check HTTP header values, so that an HTTP client never prints an invalid one in its error.

    Raises:
        SettingsError: A value is not a string, contains a control character, or begins or ends with a space.
    """
    for name, value in headers.items():
        if not isinstance(value, str) or value != value.strip() or _CONTROL.search(value):
            raise SettingsError(
                f"{where}: the value of the header {name!r} (not shown) must be a string without line breaks, control "
                "characters, or leading or trailing spaces. Check that the environment variable or file with the "
                "value does not end with a line break."
            )


def redacted_names(values: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted names of redacted values from a run's file, such as `reward.options.headers.Authorization`."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from redacted_names(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from redacted_names(value, f"{name}[{index}]")
    elif isinstance(values, str) and REDACTED in values:
        yield name


def _secrets(values: Any) -> Iterator[str]:
    """Yield every literal secret that is long enough to search for."""
    found: list[str] = []

    def note(_: str, text: str) -> str:
        found.append(text)
        return text

    _replaced(values, "", note, is_secret=False)
    for text in found:
        parts = (text, text.rpartition(" ")[2])  # with and without "Bearer"
        yield from (part for part in parts if len(part) >= MIN_HIDDEN and not _REFERENCE.fullmatch(part))


def _in_url(match: re.Match[str], name: str, replace: Any) -> str:
    """Return the replacement of a URL's password or parameter if it is a secret."""
    if match["user"]:
        return f"{match['user']}{replace(name, match['password'])}"
    return f"{match['key']}{replace(name, match['value'])}" if _NAME.fullmatch(match["name"]) else match[0]


def _replaced(values: Any, name: str, replace: Any, *, is_secret: bool) -> Any:
    """Return a copy with each secret replaced by `replace(name, text)`."""
    if isinstance(values, Mapping):
        return {
            key: _replaced(
                value,
                f"{name}.{key}" if name else str(key),
                replace,
                is_secret=is_secret or str(key) in _TABLES or _NAME.fullmatch(str(key)) is not None,
            )
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        items = (
            _replaced(value, f"{name}[{index}]", replace, is_secret=is_secret) for index, value in enumerate(values)
        )
        return tuple(items) if isinstance(values, tuple) else list(items)
    if isinstance(values, str):
        return replace(name, values) if is_secret else _IN_URL.sub(lambda match: _in_url(match, name, replace), values)
    if is_secret and isinstance(values, int | float) and not isinstance(values, bool):
        return values if replace(name, str(values)) == str(values) else REDACTED
    return values
