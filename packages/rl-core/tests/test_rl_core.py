import importlib.metadata
import subprocess
import sys

import pytest

import rl_core
from rl_core.cli import main
from rl_core.terminal_text import describe_version

HEAVY = ("ray", "vllm", "megatron", "transformers", "wandb", "torch", "safetensors", "pytest", "hypothesis")


def test_the_import_is_light_also_of_what_tests_use():
    source = f"""
import sys
import rl_core, rl_core.weights.publish, rl_core.testing, rl_core.weights.transports, rl_core.weights.update
found = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"loaded {{found}}" if found else 0)
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_every_error_is_ours_and_a_standard_one():
    kinds = [kind for kind in vars(rl_core.errors).values() if isinstance(kind, type) and kind is not rl_core.RLError]
    assert len(kinds) > 20
    for kind in kinds:
        assert issubclass(kind, rl_core.RLError), kind
        assert len(kind.__mro__) > len((kind, rl_core.RLError, Exception, BaseException, object)), kind


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rl-core {importlib.metadata.version('rl-core')}\n"
    assert describe_version("no-such-program") == "no-such-program, not installed (run from source)"
