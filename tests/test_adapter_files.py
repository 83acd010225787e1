"""Adapter files: peft and transformers load ours, we read theirs, and merges agree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from rounding import rounding_bound
from tiny_run import make_tiny_run
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from rl_core import Batch, Ragged, RowKey
from rl_core.errors import DataError
from rl_distill.checkpoints.merged_folder import merge_adapter
from rl_distill.checkpoints.peft_folder import AdapterFolder, read_adapter, write_adapter
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LoraOptions

IDS = torch.arange(3, 27)[None]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("adapter-files")).folder / "policy"


def load(policy: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, trust_remote_code=False).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def with_peft(model: Any, **config: Any) -> PeftModel:
    """Add a peft adapter with random A and B to a model."""
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "o_proj"], **config}, init_lora_weights=False)
    )


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 6},
        {"lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear", "lora_dropout": 0.2},
        {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
        {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1], "exclude_modules": ["gate_proj"]},
    ],
    ids=["alpha", "rslora", "pattern", "layers"],
)
def test_adapters_go_both_ways_and_merge_alike(config: dict[str, Any], policy: Path, tmp_path: Path):
    theirs = with_peft(load(policy), **config)
    theirs.save_pretrained(tmp_path / "peft")
    expected = logits(theirs)

    found = AdapterFolder(tmp_path / "peft")
    tensors = read_adapter(tmp_path / "peft", found.options, found.modules)
    names = [f"{name}.weight" for name, module in load(policy).named_modules() if isinstance(module, torch.nn.Linear)]
    write_adapter(tmp_path / "ours", tensors, options=found.options, matrices=names, base=policy)

    by_transformers = load(policy)
    by_transformers.load_adapter(tmp_path / "ours")
    models = [
        PeftModel.from_pretrained(load(policy), tmp_path / "ours"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, trust_remote_code=False),
        by_transformers,
    ]
    for model in models:
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=rounding_bound(float(expected.abs().max())))

    by_transformers.save_pretrained(tmp_path / "transformers")
    again = AdapterFolder(tmp_path / "transformers")
    assert (again.options, again.modules) == (found.options, found.modules)
    read = read_adapter(tmp_path / "transformers", found.options, found.modules)
    assert different_tensors(read, tensors) == []

    merge_adapter(tmp_path / "ours", tmp_path / "merged")
    merged, by_peft = load(tmp_path / "merged").state_dict(), theirs.merge_and_unload().state_dict()
    assert merged.keys() == by_peft.keys()
    for name, tensor in by_peft.items():
        bound = rounding_bound(float(tensor.abs().max()), roundings=8)
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", [Qwen3MoeConfig, Glm4MoeConfig])
def test_mixtures_merge_as_peft_does(kind: Any, tmp_path: Path):
    experts = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    experts |= {"n_group": 1, "topk_group": 1, "architectures": [f"{kind.__name__.removesuffix('Config')}ForCausalLM"]}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(kind(**SIZES, **experts), trust_remote_code=False).float().save_pretrained(
        tmp_path / "base"
    )
    theirs = with_peft(load(tmp_path / "base"), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    theirs.save_pretrained(tmp_path / "peft")
    expected = logits(theirs)

    merge_adapter(tmp_path / "peft", tmp_path / "merged")

    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "which is not an A or B of a matrix"),
        ({"lora_bias": True}, "lora_bias"),
    ],
    ids=str,
)
def test_what_peft_can_and_a_learner_cannot_is_refused(config: dict[str, Any], says: str, policy: Path, tmp_path: Path):
    with_peft(load(policy), **config).save_pretrained(tmp_path / "peft")
    with pytest.raises(DataError, match=says):
        AdapterFolder(tmp_path / "peft")


def test_the_learner_and_peft_open_each_others_adapters(policy: Path, tmp_path: Path):
    """A learner starts from peft's adapter, and peft loads the adapter in the learner's checkpoint."""
    with_peft(load(policy), lora_alpha=6).save_pretrained(tmp_path / "peft")
    lora = LoraOptions(rank=4, alpha=6, target_modules=("q_proj", "o_proj"), path=tmp_path / "peft")
    learner = MegatronLearner(policy, LearnerOptions(learning_rate=1e-2, num_threads=1), lora=lora)
    columns = {"input_ids": Ragged.from_rows(IDS.numpy(), dtype="int32")}
    columns["loss_mask"] = Ragged.from_rows([np.arange(IDS.shape[1]) > 0], dtype="bool")
    columns["loss_weights"] = Ragged.from_rows([0.1 * (np.arange(IDS.shape[1]) > 0)], dtype="float32")
    batch = Batch([RowKey("p0", 0, 0)], columns)

    def assert_alike(adapter: Path) -> None:
        said = torch.log_softmax(logits(PeftModel.from_pretrained(load(policy), adapter)), -1)[0, :-1]
        expected = said.gather(-1, IDS[0, 1:, None])[:, 0]
        np.testing.assert_allclose(learner.logprobs(batch).values[1:], expected, rtol=0, atol=1e-5)

    assert_alike(tmp_path / "peft")
    learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "checkpoint")
    assert_alike(tmp_path / "checkpoint" / "adapter")
    config = json.loads((tmp_path / "checkpoint" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["target_modules"]) == (str(policy), ["o_proj", "q_proj"])
