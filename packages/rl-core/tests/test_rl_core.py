import subprocess
import sys

import rl_core

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
    for name, kind in vars(rl_core.errors).items():
        if isinstance(kind, type) and kind is not rl_core.RLError:
            assert issubclass(kind, rl_core.RLError), name
            assert len(kind.__mro__) > len((kind, rl_core.RLError, Exception, BaseException, object)), name
