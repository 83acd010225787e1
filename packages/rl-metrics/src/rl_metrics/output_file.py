"""Checks of output files that a user names."""

from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import SettingsError


def check_output(output: Path, *, what: str, endings: Sequence[str]) -> None:
    """Check the path of an output file.

    Args:
        output: Path of the file.
        what: Name of the contents in errors, such as "the report".
        endings: Allowed endings of the file, such as ".html".

    Raises:
        SettingsError: The file has another ending or is a folder, or its folder is missing.
    """
    if output.is_dir():
        example = output / f"{what.removeprefix('the ')}{endings[0]}"
        raise SettingsError(f"{what} must be a file; {output} is a folder. Name a file in it, such as {example}.")
    if output.suffix.lower() not in endings:
        ends = " or ".join(endings)
        raise SettingsError(
            f"{what} must end in {ends}; found {output.name!r}. Name another file, such as "
            f"{output.with_suffix(endings[0])}."
        )
    if not output.parent.is_dir():
        raise SettingsError(f"{what} must be in an existing folder; found {output.parent}. Create it first.")
