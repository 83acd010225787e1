"""Runs the example notebooks and saves them with their outputs.

`python tooling/notebooks.py [NOTEBOOK ...]` runs the named notebooks, or all in examples/, in a temporary folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
"""Longest time of a cell."""


def run_notebook(file: Path, *, folder: Path, skip: str = "") -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run.

    Args:
        file: The notebook.
        folder: The working folder of its cells.
        skip: Cells with this tag do not run.

    Raises:
        CellExecutionError: A cell raised an exception; the message shows the cell and its traceback.
        CellTimeoutError: A cell took too long.
    """
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # TCP ports would be open to every local user
        transport = {"transport": "ipc", "ip": str(Path(sockets, "kernel"))}
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            startup_timeout=TIMEOUT_S,
            record_timing=False,
            skip_cells_with_tag=skip,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": transport}),
        )
        client.execute(env={**os.environ, "IPYTHONDIR": sockets})  # not the user's start-up files and history
    notebook.metadata.language_info = {"name": "python"}  # without the version of this interpreter
    return notebook


def main() -> None:
    """Run and save each notebook."""
    for file in [Path(word) for word in sys.argv[1:]] or sorted((ROOT / "examples").glob("*/*.ipynb")):
        with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
            notebook = run_notebook(file, folder=Path(folder))
        for cell in notebook.cells:
            if cell.cell_type == "code":  # without the libraries' warnings, which describe the machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, file)
        print(file)


if __name__ == "__main__":
    main()
