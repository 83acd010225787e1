"""Import the files of the arithmetic example, whose problems, tokenizer, prompts and reward are also used here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "arithmetic"


def load(name: str) -> ModuleType:
    """Import a file of the arithmetic example that has the same name as a file of this example."""
    path = str(FOLDER)
    sys.path.append(path)  # its files import each other; ours take precedence
    try:
        spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", FOLDER / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{FOLDER} must have {name}.py; found none. Check that the checkout is complete.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(path)
    return module
