"""The arithmetic example beside this one, whose problems, tokenizer, prompts and reward are used here too."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "arithmetic"


def load(name: str) -> ModuleType:
    """Import one of its files, which shares its name with one of ours."""
    path = str(FOLDER)
    sys.path.append(path)  # its files import each other; ours come first
    try:
        spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", FOLDER / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{FOLDER} must have {name}.py; found none. Is the checkout whole?")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(path)
    return module
