"""Run the example notebooks and save them with their outputs.

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
"""Maximum time of a cell in seconds."""


def run_notebook(file: Path, *, folder: Path, skip: str = "") -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs.

    Args:
        file: The notebook.
        folder: Working directory of the cells.
        skip: Cells with this tag do not run.

    Raises:
        CellExecutionError: A cell raised an exception; the message shows the cell and its traceback.
        CellTimeoutError: A cell took too long.
    """
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # other local users could connect to TCP ports
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
        client.execute(env={**os.environ, "IPYTHONDIR": sockets})  # ignore the user's start-up files and history
    notebook.metadata.language_info = {"name": "python"}  # drop the version of this interpreter
    return notebook


def main() -> None:
    """Run and save each notebook."""
    for file in [Path(word) for word in sys.argv[1:]] or sorted((ROOT / "examples").glob("*/*.ipynb")):
        with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
            notebook = run_notebook(file, folder=Path(folder))
        for cell in notebook.cells:
            if cell.cell_type == "code":  # drop the libraries' warnings, which depend on the machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, file)
        print(file)


if __name__ == "__main__":
    main()
