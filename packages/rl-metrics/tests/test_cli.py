import json
import subprocess
import sys

import pytest

from rl_metrics.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [(["doctor"], "diagnose hangs"), (["compare"], "compare two runs"), (["import", "trl"], "import a TRL run")],
)
def test_the_help_of_a_verb_says_what_it_is_for(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    usage, purpose, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: rl-metrics {' '.join(words)} [-h]")
    assert purpose.startswith(said)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("rl-metrics ")


@pytest.mark.parametrize(
    ("words", "where", "nearest"),
    [(["chek", "."], "", "check"), (["import", "ver"], " import", "verl"), (["rules", "x"], "", None)],
)
def test_an_unknown_verb_is_refused_with_the_nearest_one(words, where, nearest, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"rl-metrics{where}: error: ")
    assert last.endswith(f". Did you mean {nearest!r}?") if nearest else "Did you mean" not in last


def test_errors_of_a_verb_and_of_the_parser_have_one_prefix(capsys):
    assert main(["check", "nope"]) == 2
    assert capsys.readouterr().err.startswith("rl-metrics: error: nope must be the folder of a run")


@pytest.mark.parametrize("verb", ["check", "doctor", "compare"])
def test_warnings_are_no_part_of_the_json(verb, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"actor/lr":1.0}\n{"step":\n{"step":2,"actor/lr":1.0}\n')
    runs = [str(tmp_path)] * (2 if verb == "compare" else 1)
    result = subprocess.run(
        [sys.executable, "-m", "rl_metrics", verb, *runs, "--json"], capture_output=True, text=True, check=False
    )
    assert isinstance(json.loads(result.stdout), dict)
    assert "unreadable_lines" in result.stderr
