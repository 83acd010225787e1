"""The repository is consistent: its projects, locks, and the links, commands and examples in its documents."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = sorted(path.parent for kind in ("packages", "apps") for path in ROOT.glob(f"{kind}/*/pyproject.toml"))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(p / "README.md" for p in PROJECTS)})


def project_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("project", PROJECTS, ids=project_id)
def test_project_is_laid_out_like_the_others(project: Path):
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "changes/.gitignore", "src", "tests"):
        assert (project / name).exists(), f"{project.name} has no {name}"
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("project", PROJECTS, ids=project_id)
def test_changelog_fragments_have_a_known_kind(project: Path):
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    kinds = {kind["directory"] for kind in settings["tool"]["towncrier"]["type"]}
    known = rf"(\+[\w-]+|\d+)\.({'|'.join(kinds)})(\.\d+)?\.md"
    fragments = [fragment.name for fragment in (project / "changes").glob("*.md")]
    assert [name for name in fragments if not re.fullmatch(known, name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=project_id)
def test_links_lead_somewhere(document: Path):
    targets = re.findall(r"\]\((?![a-z]+:)([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=project_id)
def test_files_and_folders_of_packages_in_documents_exist(document: Path):
    named = set(re.findall(r"`(rl_\w+(?:/\w+)*/(?:\w+\.py)?)`", document.read_text()))
    assert [name for name in named if not any(ROOT.glob(f"*/*/src/{name}"))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=project_id)
def test_nox_verbs_in_documents_exist(document: Path):
    verbs = set(re.findall(r"^@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), flags=re.MULTILINE))
    assert {"train", "tests", "unit", "lint"} <= verbs
    named = re.findall(r"nox -s ([a-z]+)", document.read_text())
    assert set(named) <= verbs


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if BLOCK.search(one.read_text())], ids=project_id)
def test_python_examples_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(document.read_text())
    assert len(blocks) == document.read_text().count("\n```python\n")
    names: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(blocks):
        if "__main__" in block:  # a separate script, because its child processes import it
            script = tmp_path / f"example_{number}.py"
            script.write_text(block)
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        else:
            exec(compile(block, str(document), "exec"), names)


def test_lock_pins_every_package_once():
    locks = [lock for lock in ROOT.glob("locks/*.txt") if lock.name != "overrides.txt"]
    assert len(locks) > 5
    for lock in locks:
        lines = lock.read_text().split()
        assert lines
        assert all(re.fullmatch(r"[a-z0-9-]+==[^=]+", line) for line in lines), lock
        assert len({line.split("==")[0] for line in lines}) == len(lines), lock


def test_lock_leaves_out_what_breaks_vllm_on_cpu():
    names = {line.split("==")[0] for line in (ROOT / "locks/cpu.txt").read_text().split()}
    assert names & {"torchvision", "torchaudio", "torchcodec", "triton"} == set()


def test_tests_that_need_vllm_run_in_the_workspace():
    """`unit` skips files with vllm in their names; `tests` runs those that noxfile.py lists."""
    noxfile = (ROOT / "noxfile.py").read_text()
    files = [f"packages/rl-rollout/tests/{file.name}" for file in ROOT.glob("packages/rl-rollout/tests/test_*vllm*.py")]
    assert len(files) >= 3
    assert [file for file in files if f'"{file}"' not in noxfile] == []


def test_lock_and_environments_name_the_same_torch():
    torch_pin = re.search(r'^TORCH = "(.*)"$', (ROOT / "tooling" / "environments.py").read_text(), flags=re.MULTILINE)
    assert torch_pin is not None
    for lock in ("cpu", "trl"):
        assert torch_pin[1] in (ROOT / f"locks/{lock}.txt").read_text().split()


def test_every_decision_is_in_the_index():
    index = (ROOT / "docs/decisions/README.md").read_text()
    missing = [page.name for page in ROOT.glob("docs/decisions/[0-9]*.md") if f"({page.name})" not in index]
    assert missing == []


def loads_a_model(call: ast.Call) -> bool:
    """Return True if a call loads a model's folder, which may contain code, with transformers or vLLM."""
    name = ast.unparse(call.func)
    kind, _, method = name.rpartition(".")
    is_auto = method in ("from_pretrained", "from_config") and kind.rpartition(".")[2].startswith("Auto")
    return is_auto or method in ("LLM", "EngineArgs")


def test_every_load_of_a_model_refuses_its_code():
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    asking = [
        f"{file}:{node.lineno}"
        for file in files.split()
        if re.search(r"from_pretrained|from_config|EngineArgs|LLM", text := (ROOT / file).read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and loads_a_model(node)
        and "trust_remote_code=False" not in [f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords]
    ]
    assert asking == [], "transformers asks whether to run the code of the folder; pass trust_remote_code=False"


def test_every_guide_and_example_is_linked_from_the_readme():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    guides = {file for file in tracked if re.fullmatch(r"docs/guides/[\w-]+\.md", file)}
    examples = {found[0] for file in tracked if (found := re.match(r"examples/\w+", file))}
    linked = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text())
    assert sorted(guides - set(linked)) == []
    assert [name for name in sorted(examples) if not any(link.startswith(name) for link in linked)] == []
