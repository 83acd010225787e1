"""Modules of benchmarks/, which import their neighbours by name."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """Import a module by its file's name, under a name that shadows no package: `bench_trl` for trl.py."""
    places = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    sys.path[:0] = places
    try:
        if name.startswith("_"):
            return importlib.import_module(name)
        file = next(path for path in (BENCHMARKS / f"{name}.py", BENCHMARKS / "peers" / f"{name}.py") if path.exists())
        spec = importlib.util.spec_from_file_location(f"bench_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        for place in places:
            sys.path.remove(place)
    return module
