"""Load the changed source of one module in this process and its children; measure children if coverage is on."""

import json
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType


def install(path: str, source: bytes) -> None:
    """Let the import of a file compile this source instead."""
    load = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        if os.path.realpath(loader.path) == path:
            return compile(source, path, "exec", dont_inherit=True)
        return load(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


if "RL_MUTATION" in os.environ:
    change = json.loads(Path(os.environ["RL_MUTATION"]).read_text())
    install(change["path"], change["source"].encode())
if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
