"""Lookup of engines by name, and the modules that importing them loads."""

import subprocess
import sys

import pytest

from rl_core.errors import SettingsError
from rl_rollout.engines.options import engine_class, known_engines
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.engines.vllm import VLLMEngine


def test_built_in_engines_are_found_by_name() -> None:
    assert {"scripted", "transformers", "vllm"} <= set(known_engines())
    assert engine_class("vllm") is VLLMEngine
    assert engine_class("transformers") is TransformersEngine
    assert engine_class("scripted") is ScriptedEngine


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"Did you mean 'vllm'\? Known: scripted, transformers, vllm"):
        engine_class("vlm")


def test_importing_the_engines_loads_none_of_their_libraries() -> None:
    code = (
        "import sys, rl_rollout.engines, rl_rollout.engines.options, rl_rollout.engines.vllm,"
        " rl_rollout.engines.transformers, rl_rollout.engines.options;"
        "print(sorted({'vllm', 'transformers', 'torch', 'ray'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
