"""Finds circles of imports between our modules, those for types included; `nox -s imports` runs it.

The import linter leaves out imports for types, because types may name what a package does not import.
"""

import sys
from graphlib import CycleError, TopologicalSorter

import grimp


def main(packages: list[str]) -> int:
    """Print a circle of imports and return 1, or return 0 without one."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        print("A circle of imports:", " <- ".join(error.args[1]))
        return 1
    print(f"No circle of imports in {len(imported)} modules.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
