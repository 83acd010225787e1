"""Convert notebooks to pages, with their saved outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown: its text, its code, and each output as an image or plain text."""
    cells: list[dict[str, Any]] = json.loads(text)["cells"]
    return "\n\n".join(part for cell in cells for part in parts_of(cell)) + "\n"


def parts_of(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell's source, then its outputs."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![Output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
        elif said := "".join(output.get("text", data.get("text/plain", ()))).rstrip():
            yield f"```text\n{said}\n```"
