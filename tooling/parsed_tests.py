"""Parses the files with tests, and finds which functions make assertions; for tooling/assertions.py."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
RAISERS = {"pytest.raises", "pytest.warns", "pytest.fail", "pytest.RaisesGroup", "pytest.RaisesExc"}
CONFORMANCE = {"AssertionError", "ConformanceError"}
"""Errors that stand for a failed assertion in a helper."""


class Module:
    """A parsed file: its functions by name, its constants, and where its imported names come from."""

    def __init__(self, path: Path) -> None:
        """Parse a file."""
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.imports: dict[str, str] = {}
        self.modules: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions[node.name].append(node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.modules.add(node.module)
                self.imports.update({name.asname or name.name: node.module for name in node.names})
                self.modules.update(f"{node.module}.{name.name}" for name in node.names)
            elif isinstance(node, ast.Import):
                self.modules.update(name.name for name in node.names)
        self.constants = dict(assignments(self.tree.body))
        self.classes = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def uses(self) -> list[tuple[str, bool, set[str]]]:
        """For each function, its name, whether it makes an assertion itself, and the names that it reads."""
        functions = [(name, function) for name, ones in self.functions.items() for function in ones]
        return [(name, bool(own_assertions(function)), used_names(function)) for name, function in functions]


def assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that statements assign, and their values."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


class Repository:
    """All Python files that a name in a test may come from."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        """Take the names of the files below `root`; each is parsed when it is needed."""
        self.root = root
        self.paths = [root / file for file in files if (root / file).exists()]
        self._by_module = {module_name(path.relative_to(root)): path for path in self.paths}
        self._parsed: dict[Path, Module] = {}
        self._asserting: dict[Path, set[str]] = {}
        self._helpers: dict[Path, set[Path]] = {}

    @property
    def tests(self) -> list[Path]:
        """The files with tests."""
        return [path for path in self.paths if is_for_tests(path) and re.search(r"def test_", path.read_text())]

    @cached_property
    def raised(self) -> Counter[str]:
        """The number of places in our sources that raise each class."""
        sources = [path.read_text() for path in self.paths if "src" in path.parts]
        return Counter(name for text in sources for name in re.findall(r"\braise (\w+)\(", text))

    def parsed(self, path: Path) -> Module:
        """Return a file, parsed once."""
        if path not in self._parsed:
            self._parsed[path] = Module(path)
        return self._parsed[path]

    def module(self, name: str) -> Module | None:
        """Return the file that is imported under a name; None if it is not ours."""
        path = self._by_module.get(name)
        return self.parsed(path) if path else None

    def helpers(self, path: Path) -> set[Path]:
        """The files for tests that a file imports, in turn, and its conftest files."""
        if path not in self._helpers:
            self._helpers[path] = found = {path}
            imported = {self._by_module.get(name) for name in self.parsed(path).modules}
            above = {folder / "conftest.py" for folder in path.parents} & set(self.paths)
            for other in sorted({one for one in imported if one and is_for_tests(one)} | above):
                found |= self.helpers(other)
        return self._helpers[path]

    def asserting(self, path: Path) -> set[str]:
        """Return the names of the functions with assertions, their own or of what they use, that a file can use."""
        if path not in self._asserting:
            functions = [one for other in self.helpers(path) for one in self.parsed(other).uses]
            found = {name for name, is_own, _ in functions if is_own}
            size = -1
            while size < len(found):
                size = len(found)
                found |= {name for name, _, used in functions if used & found}
            self._asserting[path] = found
        return self._asserting[path]


def tracked_files(root: Path) -> list[str]:
    """Return the Python files of a checkout, with new ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()


def module_name(path: Path) -> str:
    """Return the name under which other files import a file."""
    parts = list(path.with_suffix("").parts)
    for marker in ("src", "support"):
        if marker in parts:
            parts = parts[parts.index(marker) + 1 :]
    parts = parts[:-1] if parts[-1:] == ["__init__"] else parts
    return ".".join(parts if not {"tests", "packages", "apps"} & set(parts[:1]) else parts[-1:])


def is_for_tests(path: Path) -> bool:
    """Return True for tests and for what they share."""
    return bool({"tests", "testing"} & set(path.parts)) or path.name == "conftest.py"


def used_names(node: ast.AST) -> set[str]:
    """Return the names and attributes that code reads."""
    nodes = [one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)]
    return {one.attr if isinstance(one, ast.Attribute) else one.id for one in nodes if isinstance(one.ctx, ast.Load)}


def own_assertions(node: ast.AST) -> list[ast.AST]:
    """Return the assertions that code makes itself."""
    return [one for one in ast.walk(node) if is_assertion(one)]


def is_assertion(node: ast.AST) -> bool:
    """Return True for an assertion, or a call or error that stands for one."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        return name in RAISERS or name.rpartition(".")[2].startswith("assert")
    if isinstance(node, ast.Raise) and node.exc is not None:
        return dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc) in CONFORMANCE
    return False


def dotted(node: ast.expr) -> str:
    """Return a name such as `pytest.raises`; `.all` if what stands before it is not a name."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
