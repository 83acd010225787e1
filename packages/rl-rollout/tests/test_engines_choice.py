"""The engine of a model if none is named."""

import json
from pathlib import Path

import pytest

from rl_core.errors import MissingExtraError
from rl_rollout.engines import EngineChoice, choice, choose_engine
from rl_rollout.engines.vllm import support
from rl_rollout.engines.vllm.support import VLLMSupport


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"]}))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object())
    return tmp_path


@pytest.mark.parametrize(
    ("known", "name", "reason"),
    [
        (["NewForCausalLM", "Other"], "vllm", "vLLM 1 knows NewForCausalLM"),
        (["Other"], "transformers", "vLLM 1 does not know NewForCausalLM"),
        ([], "vllm", "vLLM 1 knows NewForCausalLM"),  # a vLLM that could not tell
    ],
)
def test_vllm_serves_what_it_knows(
    folder: Path, known: list[str], name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "installed_support", lambda: VLLMSupport(name="vLLM 1", architectures=known))
    assert choose_engine(folder) == EngineChoice(name=name, reason=reason)


def test_vllm_serves_no_heads_of_a_size_that_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], **sizes}))
    found = VLLMSupport(
        name="vLLM 1", architectures=["NewForCausalLM"], head_sizes={"float32": [32, 64], "bfloat16": [16, 32]}
    )
    monkeypatch.setattr(support, "installed_support", lambda: found)
    reason = "vLLM 1 cannot serve the model: head_dim must be one of 32, 64 in float32; config.json has 16."
    assert choose_engine(folder, dtype="float32") == EngineChoice(name="transformers", reason=reason)
    assert choose_engine(folder).name == "vllm"


@pytest.mark.parametrize(
    ("config", "num_devices", "name"),
    [
        ({"model_type": "gemma3", "vision_config": {}}, None, "transformers"),
        ({"model_type": "gemma3", "vision_config": {}}, 1, "vllm"),
        ({"model_type": "gemma3"}, None, "vllm"),
        ({"text_config": {"use_bidirectional_attention": "vision"}, "vision_config": {}}, None, "transformers"),
        ({"text_config": {}, "vision_config": {}}, None, "vllm"),
    ],
)
def test_vllm_on_cpus_serves_no_images_whose_tokens_attend_to_each_other(
    folder: Path, config: dict[str, object], num_devices: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(support, "installed_support", lambda: VLLMSupport(name="vLLM 1", num_devices=num_devices))
    found = choose_engine(folder)
    assert found.name == name
    assert ("each token of an image attends to all tokens of the image" in found.reason) == (name == "transformers")


def test_without_vllm_the_transformers_engine_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> VLLMSupport:
        raise MissingExtraError("vLLM cannot be imported here")

    monkeypatch.setattr(support, "installed_support", broken)
    assert choose_engine(folder) == EngineChoice(name="transformers", reason="vLLM cannot be imported here")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    assert choose_engine(folder) == EngineChoice(name="transformers", reason="vLLM is not installed")
