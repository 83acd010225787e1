"""Files encrypted with age for those who download them. Only this file knows the `pyrage` package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import MissingExtraError
from rl_rollout.gateway import RefusedError, refused_field

MAX_RECIPIENTS = 10


def encrypt_files(files: Sequence[Path], recipients: Sequence[str]) -> None:
    """Replace each file by an encrypted one, whose name ends in ".age".

    Args:
        files: The files.
        recipients: Keys of age ("age1...") or SSH public keys, as text.

    Raises:
        RefusedError: A recipient is not a key, or there are too many.
        MissingExtraError: pyrage is not installed.
    """
    try:
        import pyrage
    except ImportError as error:
        raise MissingExtraError(
            f"encrypted downloads need pyrage: {error}. Install rl-service[service] as the README says."
        ) from error
    if len(recipients) > MAX_RECIPIENTS:
        raise refused_field("age_encryption_recipients", f"{len(recipients)}", f"at most {MAX_RECIPIENTS}")
    keys: list[Any] = []
    for text in recipients:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise RefusedError(f"age_encryption_recipients has no key in {text[:80]!r}: {error}.") from None
    for file in files:
        pyrage.encrypt_file(str(file), f"{file}.age", keys)
        file.unlink()
