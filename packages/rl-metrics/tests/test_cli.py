import pytest

from rl_metrics.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [(["doctor"], "why a run hangs"), (["compare"], "how two runs differ"), (["import", "trl"], "trainer_state.json")],
)
def test_the_help_of_a_verb_says_what_it_is_for(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    usage, purpose, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: rl-metrics {' '.join(words)} [-h]")
    assert purpose.startswith(said)
