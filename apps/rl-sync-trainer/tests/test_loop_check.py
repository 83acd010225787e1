"""`train --dry-run` tries the agent loop: it refuses a loop that cannot run, and lists the tools of servers."""

import sys
from pathlib import Path

import mcp_calculator
import pytest
from tiny_run import TinyRun, make_tiny_run, train_here

PLAIN = 'turns = {kind = "plain"}'
CALCULATOR = f'["python", "{mcp_calculator.__file__}"]'


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


def dry_run(run: TinyRun, options: str, loop: str = "tools") -> int:
    return train_here(run, "--dry-run", rollout__loop=loop, rollout__loop_options=f"{{{options}}}")


def test_the_plan_names_servers_and_their_tools(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    server = f'calculator = {{command = {CALCULATOR}, tools = ["add", "fail"]}}'
    file = tiny_run.folder / "my_tools.py"
    file.write_text('def shout(text: str) -> str:\n    """Return it in capitals."""\n    return text.upper()\n')
    assert dry_run(tiny_run, f'{PLAIN}, tools = ["{file}:shout"], mcp_servers = {{{server}}}') == 0
    said = capsys.readouterr()
    assert "loop tools\n             tools shout\n             MCP server calculator: add, fail\n" in said.out
    shown = 'note: no chat template shows the model its tools, because turns.kind is "plain"'
    assert " ".join((said.out + said.err).split()).count(shown) == 1


@pytest.mark.parametrize(
    ("loop", "options", "says"),
    [
        ("tools", f'{PLAIN}, mcp_servers = {{x = {{command = ["no-such-program"]}}}}', "MCP server 'x' did not start"),
        (
            "tools",
            'mcp_servers = {x = {command = ["python"], env = {A = 1}}}',
            "mcp_servers.x must be a mapping, a string to a string; found {'A': '(redacted)'}",
        ),
        ("tools", "", "the agent loop 'tools' has no tools"),
        ("verifiers", 'tokenizer = "t"', "needs the library verifiers"),
    ],
)
def test_a_loop_that_cannot_run_is_refused(
    tiny_run: TinyRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    options: str,
    says: str,
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    assert dry_run(tiny_run, options, loop) == 2
    said = capsys.readouterr()
    assert says in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert not Path(tiny_run.run_folder).exists()
