"""A script of `run_trial`: decodes strangers' images as a run would."""

import sys
from pathlib import Path

from rl_core.images import open_image


def main(files: list[list[str]]) -> None:
    """Decode each image.

    Args:
        files: Path of each image, and its place in the user's data, for messages.

    Raises:
        ValueError: An image cannot be decoded.
    """
    for path, where in files:
        sys.stdout.write(f"decoding the image at {where}\n")
        try:
            open_image(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
