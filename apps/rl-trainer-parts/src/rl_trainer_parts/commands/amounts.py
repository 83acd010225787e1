"""Sizes as text."""

GIB = 2**30
MIB = 2**20


def size_text(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 1 GiB, such as "3.50 MiB"."""
    return f"{size_bytes / MIB:.2f} MiB" if size_bytes < GIB else f"{size_bytes / GIB:.2f} GiB"
