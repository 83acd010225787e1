"""The command line of the service."""

import re

import pytest

from rl_core.errors import SettingsError
from rl_service.main import main, read_key
from rl_trainer_parts.run.folder import RunFolder


def test_help_explains_the_settings(capsys):
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert "RL__SERVER__PORT" in text
    assert "explained by `serve --help SECTION`" in text
    assert "--lora.max_rank=integer  (at least 0; default 32)" in text
    assert main(["serve", "--help", "limits"]) == 0
    assert "--limits.max_waiting=integer" in capsys.readouterr().out
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "serve needs a policy: rl-service serve --policy MODEL_FOLDER"),
        (["serve", "--policy=m", "--server.prt=1"], "unknown setting 'server.prt' .* Did you mean 'server.port'"),
        (["serve", "--lora.max_rank=4"], "policy.path: required"),
        (["serve", "--policy", "m", "--lora.max_rank=-1"], "lora.max_rank must be at least 0; found -1"),
        (
            ["serve", "--policy", "m", "--lora.max_rank=0", "--lora.alpha=8"],
            "lora.alpha has no effect, because lora.max",
        ),
        (
            ["serve", "--policy", "m", "--engine.name=transformers", "--vllm.block_size=8"],
            "vllm.block_size has no effect",
        ),
        (["serve", "--policy", "m", "--vllm.max_lora_rank=3"], "because lora.max_rank decides. Leave it out"),
        (["train"], "unknown command 'train'; known: serve"),
    ],
)
def test_mistakes_are_refused_by_name(words, message, capsys):
    assert main(words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_has_one_service(tmp_path, capsys):
    with RunFolder(tmp_path / "service").held():
        assert main(["serve", "--policy", "m", f"--server.folder={tmp_path / 'service'}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is in use by a live run" in said
    assert "choose another folder with --server.folder=FOLDER" in said
    assert (tmp_path / "service").stat().st_mode & 0o777 == 0o700


def test_a_key_is_made_once_and_only_for_this_user(tmp_path):
    file = tmp_path / "new" / "key"
    key = read_key(file)
    assert key.startswith("tml-")
    assert read_key(file) == key
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("tml-short")
    with pytest.raises(SettingsError, match="a key of at least 36 characters"):
        read_key(file)
