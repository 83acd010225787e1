"""Adapters in peft's format: round trips are exact, errors name invalid files, and a merge adds the product."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensor_folders import damage

from rl_core.errors import DataError
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.hf_folder import PolicyTensors, write_policy_folder
from rl_distill.checkpoints.merged_folder import merge_adapter
from rl_distill.checkpoints.peft_folder import AdapterFolder, read_adapter, write_adapter
from rl_distill.options import LoraOptions

OPTIONS = LoraOptions(rank=3, alpha=7.5, rslora=True, dropout=0.25)
PEFT = "base_model.model."
Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def make_adapter(
    folder: Path, policy: Path, *, ends: tuple[str, ...] = ("1.self_attn.q_proj", "up_proj")
) -> dict[str, torch.Tensor]:
    """Write a random adapter of the policy's matrices with these name endings; return its tensors."""
    shapes = tensor_shapes(parse_policy_config(read_policy_config(policy)))
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name in (name for name in shapes if name.removesuffix(".weight").endswith(ends)):
        outputs, inputs = shapes[name]
        module = name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = torch.randn(OPTIONS.rank, inputs)
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, OPTIONS.rank)
    write_adapter(folder, tensors, options=OPTIONS, matrices=shapes, base=policy)
    return tensors


@pytest.fixture
def adapter(tied_policy: Path, tmp_path: Path) -> Path:
    make_adapter(tmp_path / "adapter", tied_policy)
    return tmp_path / "adapter"


def test_a_round_trip_is_exact(tied_policy: Path, tmp_path: Path):
    tensors = make_adapter(tmp_path / "adapter", tied_policy)
    found = AdapterFolder(tmp_path / "adapter")

    modules = ("model.layers.0.mlp.up_proj", UP, Q)
    assert sorted(found.modules.items()) == [(name, {Q: (64, 32)}.get(name, (48, 32))) for name in modules]
    assert (found.options.rank, found.options.alpha, found.options.rslora, found.options.dropout) == (
        3,
        7.5,
        True,
        0.25,
    )
    assert found.base == str(tied_policy)
    read = read_adapter(tmp_path / "adapter", OPTIONS, found.modules)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())
    product = tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"]
    torch.testing.assert_close(found.merged(Q, torch.ones(64, 32)), 1 + 7.5 / 3**0.5 * product)


def test_target_modules_are_ends_where_these_mean_no_other_matrix(tied_policy: Path, tmp_path: Path):
    def names(folder: str, *ends: str) -> list[str]:
        make_adapter(tmp_path / folder, tied_policy, ends=ends)
        return json.loads((tmp_path / folder / "adapter_config.json").read_text())["target_modules"]

    assert names("ends", "q_proj", "up_proj") == ["q_proj", "up_proj"]
    assert names("whole", "0.self_attn.q_proj") == ["model.layers.0.self_attn.q_proj"]


def test_an_adapter_is_not_overwritten(adapter: Path, tied_policy: Path):
    with pytest.raises(DataError, match="already has an adapter; choose a new folder"):
        make_adapter(adapter, tied_policy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "must have peft_type LORA; found 'IA3'. Merge it with peft's merge_and_unload"),
        ({"peft_type": ["LORA"]}, "must have peft_type LORA"),
        ({"bias": "all"}, "has 'bias' = 'all', which is not supported. Train again with bias = none"),
        ({"use_dora": True}, "has 'use_dora' = True, which is not supported. Train again without DoRA"),
        ({"modules_to_save": ["lm_head"]}, "has 'modules_to_save' = .'lm_head'., which is not supported"),
        ({"fan_in_fan_out": True}, "has 'fan_in_fan_out' = True, which is not supported. Transpose"),
        ({"rank_pattern": {"q_proj": 2}}, "has 'rank_pattern' = .* Train again with one rank"),
        ({"alpha_pattern": {"q_proj": 2}}, "has 'alpha_pattern' = .* Train again with one alpha"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "has 'target_parameters' = "),
        ({"alora_invocation_tokens": [1]}, "has 'alora_invocation_tokens' = "),
        ({"made_up_later": {"a": 1}}, "has 'made_up_later' = .* which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4', which also modified the base"),
        ({"init_lora_weights": [1]}, "has init_lora_weights"),
        ({"r": 0}, "must have r >= 1"),
        ({"r": True}, "must have r >= 1"),
        ({"r": None}, "must have r >= 1"),
        ({"r": 4}, r"weight' must have shape \[(4, in|out, 4)\], since r is 4 in adapter_config.json; found \["),
        ({"lora_alpha": None}, "lora_alpha above 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha above 0"),
        ({"lora_alpha": 10**400}, "lora_alpha above 0"),
        ({"lora_dropout": 1}, "lora_dropout below 1"),
        ({"use_rslora": "yes"}, "use_rslora true or false"),
        ({"target_modules": ["up_proj"]}, f"does not list '{Q}' in target_modules"),
        ({"target_modules": ["up_proj", "q_proj", "o_proj"]}, "lists 'o_proj' in target_modules, but .* no such"),
        ({"target_modules": [["q_proj"]]}, "must have a list of names or a pattern as target_modules"),
        ({"target_modules": {"q_proj": 1}}, "must have a list of names or a pattern as target_modules"),
    ],
    ids=str,
)
def test_another_kind_of_adapter_is_refused(changes: dict[str, Any], says: str, adapter: Path):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(DataError, match=says):
        AdapterFolder(adapter)


def test_what_says_nothing_more_is_taken(adapter: Path):
    file = adapter / "adapter_config.json"
    more = {
        "target_modules": "(a+)+b",
        "exclude_modules": ["k_proj"],
        "layers_to_transform": [1],
        "auto_mapping": {"a": 1},
    }
    more |= {"init_lora_weights": "gaussian", "made_up_later": None, "peft_version": "9", "bias": "none"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    assert AdapterFolder(adapter).options.rank == 3


def change(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


A, B = f"{PEFT}{Q}.lora_A.weight", f"{PEFT}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(A), f"has no tensor '{A}'; an adapter has both"),
        (lambda t: t.pop(B), f"has no tensor '{B}'; an adapter has both"),
        (lambda t: (t.pop(A), t.pop(B)), ""),
        (lambda t: t.clear(), "has no tensors"),
        (lambda t: t.update({A: t[A][:2].clone()}), rf"'{A}' must have shape \[3, in\].*found \[2, 32\]"),
        (lambda t: t.update({B: t[B].T.contiguous()}), rf"'{B}' must have shape \[out, 3\].*found \[3, 64\]"),
        (lambda t: t.update({A: torch.zeros(3)}), r"found \[3\]"),
        (lambda t: t.update({A: torch.zeros(3, 0)}), r"found \[3, 0\]"),
        (lambda t: t.update({A: t[A].to(torch.int8)}), "must be stored as one of F32, BF16, F16; found I8"),
        (lambda t: t.update({A: t[A].double()}), "must be stored as one of F32, BF16, F16; found F64"),
        (lambda t: t.update({f"{PEFT}{Q}.lora_magnitude_vector.weight": torch.zeros(3)}), "which is not an A or B"),
        (lambda t: t.update({f"{PEFT}lm_head.weight": torch.zeros(3)}), "which is not an A or B"),
        (lambda t: t.update({f"{Q}.lora_A.weight": t[A].clone()}), "which is not an A or B"),
    ],
)
def test_other_tensors_are_refused(edit: Callable[[dict[str, torch.Tensor]], object], says: str, adapter: Path):
    change(adapter, edit)
    if says:
        with pytest.raises(DataError, match=says.replace(".", r"\.").replace(r"\.*", ".*")):
            AdapterFolder(adapter)
    else:  # target_modules also names a matrix that has no tensors
        with pytest.raises(DataError, match=r"in target_modules, but .* has no such matrix"):
            AdapterFolder(adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("how", ["missing", "torn", "empty", "folder", "pipe"])
def test_a_damaged_file_is_refused(name: str, how: str, adapter: Path):
    damage(adapter / name, how)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        AdapterFolder(adapter)


@pytest.mark.parametrize(
    ("changes", "modules", "says"),
    [
        ({"rank": 8}, {}, "rank is 3, this learner's 8"),
        ({"alpha": None}, {}, r"alpha is 7\.5, this learner's 6\.0"),
        ({"rslora": False}, {}, "rslora is True, this learner's False"),
        ({}, {"model.layers.0.self_attn.v_proj": (32, 32)}, r"it does not adapt 'model\.layers\.0\.self_attn\.v_proj'"),
        ({}, {UP: None}, rf"it also adapts '{UP}'"),
        ({}, {UP: (48, 64)}, rf"{UP} is \[48, 32\], this policy's \[48, 64\]"),
    ],
    ids=str,
)
def test_a_learner_begins_with_its_own_kind_alone(
    changes: dict[str, Any], modules: dict[str, Any], says: str, adapter: Path
):
    wanted = {**AdapterFolder(adapter).modules, **modules}
    own = {name: shape for name, shape in wanted.items() if shape is not None}
    with pytest.raises(DataError, match=says):
        read_adapter(adapter, replace(OPTIONS, **changes), own)


def expected_merge(policy: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the base tensors in float32 with the adapter added."""
    weights = dict(PolicyTensors(policy, parse_policy_config(read_policy_config(policy))).whole(torch.float32))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if "lora_A" in name]:
        b = tensors[name.replace("lora_A", "lora_B")]
        weights[name.removeprefix(PEFT).replace(".lora_A", "")] += OPTIONS.scaling * b @ tensors[name]
    return weights


def test_a_merge_into_shards_of_bfloat16_rounds_once(untied_policy: Path, tmp_path: Path):
    config_json = read_policy_config(untied_policy)
    config = parse_policy_config(config_json)
    weights = dict(PolicyTensors(untied_policy, config).whole(torch.bfloat16))
    write_policy_folder(tmp_path / "base", config_json, weights, source_dir=untied_policy, max_shard_bytes=8_000)
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 3
    make_adapter(tmp_path / "adapter", tmp_path / "base", ends=("up_proj", "lm_head"))

    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="is not a folder on this machine"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "moved")

    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = expected_merge(tmp_path / "moved", tmp_path / "adapter")
    assert {str(tensor.dtype) for tensor in merged.values()} == {"torch.bfloat16"}
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name].float(), tensor, rtol=2**-8, atol=1e-6)
    assert read_policy_config(tmp_path / "merged")["dtype"] == "bfloat16"


def test_an_adapter_of_another_policy_is_not_merged(adapter: Path, mixture_policy: Path, tmp_path: Path):
    with pytest.raises(
        DataError, match=r"adapts 'model\.layers\.\d\.mlp\.up_proj' of shape \[48, 32\]; .* has no such matrix"
    ):
        merge_adapter(adapter, tmp_path / "merged", base=mixture_policy)
    assert not (tmp_path / "merged").exists()
