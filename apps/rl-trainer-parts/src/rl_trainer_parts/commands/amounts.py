"""Counts and sizes as text."""

GIB = 2**30
MIB = 2**20


def counted(count: int, one: str, several: str = "") -> str:
    """Return a number with its noun, such as "1 step" or "2 steps".

    Args:
        count: The number.
        one: The singular.
        several: The plural; by default the singular with an "s".
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def size_text(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 1 GiB, such as "3.50 MiB"."""
    return f"{size_bytes / MIB:.2f} MiB" if size_bytes < GIB else f"{size_bytes / GIB:.2f} GiB"
