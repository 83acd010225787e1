"""Each package's page in docs/reference lists its public names and uses them in an example."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl_core", "rl_rollout", "rl_distill", "rl_metrics")
MAX_LINES = 150


def page_of(package: str) -> str:
    return (ROOT / "docs" / "reference" / f"{package.replace('_', '-')}.md").read_text()


def names_in_table(page: str) -> dict[str, set[str]]:
    """Return names by module, from rows such as "| `rl_core.queue` | `Claim`, `Lease` |"."""
    rows = re.findall(r"^\| `(rl_\w+(?:\.\w+)*)` \| (.*) \|$", page, flags=re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def names_of(module: str) -> set[str]:
    """Return a module's `__all__`, or its public classes and functions, without importing it: it may need a backend."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {name for name in defined if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_lists_the_public_names(package: str):
    listed = names_in_table(page_of(package))
    assert listed == {module: names_of(module) for module in listed}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_other_packages_import_is_on_the_page(package: str):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one.get("protected_modules") == [package])
    public = {line.removeprefix("** -> ") for line in contract["ignore_imports"]}
    assert public <= names_in_table(page_of(package)).keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_shows_the_names_of_the_package_itself_at_work(package: str):
    page = page_of(package)
    assert len(page.splitlines()) <= MAX_LINES
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE))
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert names_of(package) - used == set()


def test_documents_teach_public_names_alone():
    public = {module: names for package in PACKAGES for module, names in names_in_table(page_of(package)).items()}
    documents = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/*.md")})
    taught = {
        (str(document.relative_to(ROOT)), f"{node.module}.{alias.name}")
        for document in documents
        for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES
        for alias in node.names
        if alias.name not in public.get(node.module, set())
    }
    assert taught == set()


PASSES_PATHS_ON = {"read_json", "read_json_object", "read_plain", "read_record", "read_toml", "require_plain"}
"""Functions that only pass their path to `open_plain`, which also accepts text."""
MADE_BY_THE_TRAINERS = {"LearnerHost.__init__", "Rows.__init__", "remove_unlocked_folders"}


def functions_with_paths(package: str) -> dict[str, list[str]]:
    """Return the decorators of public functions and methods with a parameter that is annotated as a path only."""
    public = set().union(*names_in_table(page_of(package)).values())
    found: dict[str, list[str]] = {}
    for file in (ROOT / "packages" / package.replace("_", "-") / "src").rglob("*.py"):
        if "Path" not in file.read_text():
            continue
        for node in ast.parse(file.read_text()).body:
            is_class = isinstance(node, ast.ClassDef)
            if getattr(node, "name", "") not in public or (is_class and "Protocol" in map(ast.unparse, node.bases)):
                continue
            for part in node.body if is_class else [node]:
                if not isinstance(part, ast.FunctionDef) or (part.name[0] == "_" and part.name != "__init__"):
                    continue
                arguments = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                hints = [re.findall(r"\w+", ast.unparse(one.annotation)) for one in arguments if one.annotation]
                if any("Path" in hint and not {"str", "Callable"} & {*hint} for hint in hints):
                    name = f"{node.name}.{part.name}" if is_class else part.name
                    found[name] = [ast.unparse(one) for one in part.decorator_list]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_take_a_text_where_they_take_a_path(package: str):
    """Each uses `converts_arguments`, which has its own tests, or is a listed exception; pytest calls the checks."""
    found = {name: used for name, used in functions_with_paths(package).items() if ".test_" not in name}
    assert len(found) > 3
    lacking = {name for name, decorators in found.items() if "converts_arguments" not in decorators}
    assert lacking <= PASSES_PATHS_ON | MADE_BY_THE_TRAINERS


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
DEFINITION = re.compile(r"^ *(?:async )?def (\w+)", flags=re.MULTILINE)


def sources(pattern: str) -> str:
    return "\n".join(path.read_text() for path in ROOT.glob(pattern))


def test_the_architecture_names_what_the_controller_asks_roles():
    rows = re.findall(r"^\| \w+ \| `roles/(\w+)\.py`: .*a `(rl_\w+)\..*` \| (.*) \|$", ARCHITECTURE, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["learner", "rollouter", "teachers"]
    links = sources("apps/rl-async-trainer/src/rl_async_trainer/controller/*.py")
    for role, package, names in rows:
        defined = sources(f"apps/*/src/rl_async_trainer/roles/{role}.py") + sources(f"packages/*/src/{package}/**/*.py")
        for name in re.findall(r"`(\w+)`", names):
            assert f"async def {name}(" in defined
            assert f".{name}(" in links


def test_the_architecture_names_the_calls_of_a_weight_update():
    rows = re.findall(r"^\| \d+ \| `(?:(\w+)\.)?(\w+)` \|.*\| `(.*?)`(?:, `.*`)? \|$", ARCHITECTURE, flags=re.MULTILINE)
    way = [row for row in rows if row[2].endswith(".py")]
    assert len(way) == 11
    for owner, function, file in way:
        choices = re.search(r"{(.*)}", file)
        files = [file.replace(f"{{{choices[1]}}}", one) for one in choices[1].split(",")] if choices else [file]
        for one in files:
            found = sources(f"*/*/src/{one}")
            assert function in DEFINITION.findall(found)
            assert not owner or choices or owner == "Stepper" or f"class {owner}" in found
