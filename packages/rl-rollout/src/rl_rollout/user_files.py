"""Classes and functions in the user's files, given as `path.py:name`."""

import importlib.util
import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.errors import SettingsError
from rl_core.registry import Registry, nearest_name

TRACEBACK_LINES = 6


def find_in(registry: Registry[Any], reference: str, *, is_fresh: bool = False) -> Any:
    """Return the entry of a registry, or an attribute of a user's file as `path.py:name`.

    Args:
        registry: The registry. Its description appears in messages.
        reference: The registered name, or the file and name.
        is_fresh: See `load_attribute`.

    Raises:
        SettingsError: No such name or file exists.
    """
    if ":" in reference or reference.endswith(".py"):
        return load_attribute(reference, kind=registry.kind, is_fresh=is_fresh)
    return registry.get(reference)


def load_attribute(reference: str, *, kind: str, is_fresh: bool = False) -> Any:
    """Import a file and return one attribute of it.

    Args:
        reference: `path.py:name`. A relative path starts at the working directory.
        kind: The kind of object for messages, such as "tool".
        is_fresh: Import the file again. Otherwise, two names of one file share its module state.

    Raises:
        SettingsError: The file is missing, raises on import, or has no such name.
    """
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text or not name:
        raise SettingsError(f"{kind} {reference!r} must be given as path.py:name.")
    path = Path(path_text)
    if not path.is_file():
        raise SettingsError(f"{kind} {reference!r}: the file {path.absolute()} does not exist.")
    module = _import_file(path, what=f"{kind} {reference!r}", is_fresh=is_fresh)
    if not hasattr(module, name):
        own = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise SettingsError(
            f"{kind} {reference!r}: {path} has no {name!r}; it has {', '.join(own) or 'nothing'}."
            f"{nearest_name(name, own)}"
        )
    return getattr(module, name)


def _import_file(path: Path, *, what: str, is_fresh: bool) -> ModuleType:
    version = f"{path.resolve()} {path.stat().st_mtime_ns}"
    module_name = f"rl_file_{path.stem}_{blake2b(version.encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules and not is_fresh:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{what}: {path} is not a Python file; expected a name ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
        raise SettingsError(f"{what}: importing {path} raised:\n" + "\n".join(tail)) from error
    return module
