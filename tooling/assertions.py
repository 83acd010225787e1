"""Finds tests that could pass although the code is wrong; `nox -s lint` runs it.

`python -m tooling.assertions [FILE ...]` checks the named files, or all tests of the repository. It finds:

- a test without an assertion, its own or that of a function from the tests that it uses;
- `assert all(...)`, and a loop with all assertions of a test, over what may be empty: nothing in the test shows that it
  is not, such as its literal, its length, an element of it, or `assert rows` (Hypothesis varies what it passes);
- `pytest.raises` and `pytest.warns` without `match`, unless the test reads the error, or its class is specific:
  defined by a test, one of `SPECIFIC`, or raised in one place of our sources;
- a name that makes no claim: it has fewer than three words, no verb of `VERBS`, or ends with a word of `VAGUE`;
- a skip or an expected failure without a reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tooling.known_elements import Elements, conjuncts
from tooling.parsed_tests import Function, Module, Repository, dotted, own_assertions, tracked_files, used_names

ROOT = Path(__file__).resolve().parents[1]
SPECIFIC = {
    *(
        "KeyboardInterrupt",
        "CancelledError",
        "FrozenInstanceError",
        "TimeoutExpired",
        "TimeoutError",
        "BrokenPipeError",
    ),
    *("RecursionError", "StopIteration", "Empty", "AuthenticationError", "NotFoundError", "DecryptError"),
    *("RemoteProtocolError", "APITimeoutError", "TimeoutException", "RayActorError"),
    *("EngineDiedError", "OutdatedLeaseError", "RoleRestartedError", "StopRequestedError"),
}
"""Classes of errors, of libraries and ours, that have one meaning."""
VERBS = set(
    re.findall(
        r"\w+",
        """
    is are was were be been has have had can cannot may must will does do give gives keep kept leave left send
    sent read hold held lose lost make made take taken say said tell told find found run come go get put set let
    cut fit begin begun write written break broken know known hear see seen bring brought win won pay stand meet
    met build built hidden chosen given drawn shown thrown grow grown worn agree need want stay become differ
    match fail pass end start stop count wait share use work train return raise reach follow change cost appear
    belong happen hurt die live bear choose draw throw shut spread split hit beat bind bound caught taught meant
    slept spent stuck understood survive call contradict copy travel load learn carry arrive wake lie compare
    lead overlap align continue vote conform equal
        """,
    )
)
"""Verbs that may be in a name besides words that end in -s or -ed, such as those before which a plural stands."""
VAGUE = {"basic", "correct", "correctly", "misc", "ok", "properly", "sanity", "simple", "works"}


class Finding(NamedTuple):
    """What is wrong with a test, and where."""

    file: str
    line: int
    text: str


class Test:
    """Checks one test."""

    def __init__(self, repository: Repository, module: Module, function: Function) -> None:
        """Take the test, and where its names come from."""
        self._repository, self._module, self._function = repository, module, function

    @property
    def _is_property(self) -> bool:
        """Hypothesis varies what the test iterates over and asks, so some examples reach its assertions."""
        return any(
            isinstance(node, ast.Call) and dotted(node.func) == "given" for node in self._function.decorator_list
        )

    @cached_property
    def _elements(self) -> Elements:
        return Elements(self._repository, self._module, self._function)

    def findings(self) -> Iterator[tuple[int, str]]:
        """Yield lines and what is wrong there."""
        for text in [*name_faults(self._function.name)]:
            yield self._function.lineno, text
        if not self._is_sure(self._function.body):
            is_any = self._reads(self._function)
            missing = "an assertion that runs whatever a collection or condition holds" if is_any else "an assertion"
            yield self._function.lineno, f"has no test of its claim; it needs {missing}"
        for node in ast.walk(self._function):
            if isinstance(node, ast.Assert):
                for part in conjuncts(node.test):
                    yield from self._vacuous(part)

    def _vacuous(self, part: ast.expr) -> Iterator[tuple[int, str]]:
        if (
            isinstance(part, ast.Call)
            and dotted(part.func) == "all"
            and not (self._is_property or self._elements.has(part.args[0]))
        ):
            yield part.lineno, f"all(...) also holds for nothing; show that {source(part.args[0])} has elements"

    def _is_sure(self, body: Iterable[ast.stmt]) -> bool:
        return any(self._asserts(node) for node in body)

    def _asserts(self, node: ast.stmt) -> bool:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                either = any if self._is_property else all
                return self._reads(test) or either((self._is_sure(body), self._is_sure(orelse)))
            case ast.For(iter=iterable, body=body) | ast.AsyncFor(iter=iterable, body=body):
                has_elements = self._is_property or self._elements.has(iterable)
                return self._reads(iterable) or (has_elements and self._is_sure(body))
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return any(self._reads(item.context_expr) for item in items) or self._is_sure(body)
            case ast.Try(body=body, orelse=orelse, finalbody=finalbody, handlers=handlers):
                is_handled = bool(handlers) and all(self._is_sure(one.body) for one in handlers)
                return self._is_sure(finalbody) or self._is_sure(orelse) or self._is_sure(body) or is_handled
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return False  # its use counts
        return self._reads(node)

    def _reads(self, node: ast.AST) -> bool:
        return bool(own_assertions(node)) or bool(used_names(node) & self._repository.asserting(self._module.path))


def source(node: ast.expr) -> str:
    """Return the text of what a comprehension iterates over."""
    return ast.unparse(node.generators[0].iter if isinstance(node, ast.GeneratorExp | ast.ListComp) else node)


def name_faults(name: str) -> Iterator[str]:
    """Yield why a name makes no claim."""
    words = name.split("_")[1:]
    if words[-1] in VAGUE and "that" not in words:
        yield f"{name} does not say what is asserted: {words[-1]!r} says nothing"
    elif len(words) < 3:
        yield f"{name} does not say what is asserted; write a claim of at least three words"
    elif not any(
        w in VERBS or w.endswith("ed") or (i and len(w) > 3 and re.search(r"[^s]s$", w)) for i, w in enumerate(words)
    ):
        yield f"{name} does not say what is asserted: no verb of VERBS"


def call_findings(repository: Repository, module: Module) -> Iterator[tuple[int, str]]:
    """Yield `raises` without a message, and skips without a reason."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    for call in calls:
        name, is_matched = dotted(call.func), any(word.arg == "match" for word in call.keywords)
        if name in ("pytest.raises", "pytest.warns") and not is_matched and not is_specific(repository, module, call):
            yield call.lineno, f"{ast.unparse(call)} has no match"
        if re.fullmatch(r"pytest\.(mark\.)?(skip|skipif|xfail)", name) and not has_reason(call):
            yield call.lineno, f"{name} needs a reason"
    called = {id(call.func) for call in calls}
    for node in ast.walk(module.tree):
        is_bare = isinstance(node, ast.Attribute) and id(node) not in called
        if is_bare and dotted(node) in ("pytest.mark.skip", "pytest.mark.xfail"):
            yield node.lineno, f"{dotted(node)} needs a reason"


def has_reason(call: ast.Call) -> bool:
    """Return True if a skip says why, in two words or more."""
    values = [word.value for word in call.keywords if word.arg == "reason"]
    values += call.args[:1] if not dotted(call.func).endswith("skipif") else []
    return any(not (isinstance(value, ast.Constant) and len(str(value.value).split()) < 2) for value in values)


def is_specific(repository: Repository, module: Module, call: ast.Call) -> bool:
    """Return True if a class of errors says what went wrong, or the test reads or raises the error itself."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.context_expr is call and (item.optional_vars or isinstance(node.body[-1], ast.Raise)):
                    return True
    if not call.args:
        return False
    kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]
    return all(is_specific_class(repository, module, ast.unparse(kind)) for kind in kinds)


def is_specific_class(repository: Repository, module: Module, name: str) -> bool:
    """Return True if a class of errors alone says what went wrong."""
    last = name.rpartition(".")[2]
    return (
        last in SPECIFIC
        or any(last in repository.parsed(path).classes for path in repository.helpers(module.path))
        or repository.raised[last] == 1
    )


def findings(repository: Repository, path: Path) -> list[Finding]:
    """Return what is wrong in a file, by line."""
    module, file = repository.parsed(path), str(path.relative_to(repository.root))
    found = list(call_findings(repository, module))
    for name, functions in module.functions.items():
        for function in functions if name.startswith("test_") else ():
            found += Test(repository, module, function).findings()
    return [Finding(file, line, text) for line, text in sorted(set(found))]


def main(names: Sequence[str]) -> int:
    """Print what was found in the named files, or in all tests; return 1 if anything was."""
    repository = Repository(ROOT, tracked_files(ROOT))
    paths = [Path(name).resolve() for name in names] or repository.tests
    found = [one for path in paths for one in findings(repository, path)]
    for one in found:
        print(f"{one.file}:{one.line}: {one.text}")
    print(f"{len(found)} findings in {len(paths)} files with tests.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
