"""Experts in the layouts of vLLM's kernels, read back bit for bit: packed, padded, and over ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from rl_core.weights.digests import probe_tensor
from rl_rollout.engines.vllm.live_weights import join_parts, live_parts
from rl_rollout.engines.vllm.mixtures import expert_parts, noted

NUM_EXPERTS, HIDDEN, WIDTH = 3, 64, 40
SHAPES = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
LAYOUTS = ("vec", "amx", "plain")
SWAPPED = "up before gate"
"""A layout that the project does not know, such as FlashInfer's."""


def expert_of(name: str | None) -> str | None:
    return name and name.rsplit(".", 2)[0]


def random_experts(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"mlp.experts.{expert}.{name}.weight": torch.randn(shape, generator=generator)
        for expert in range(NUM_EXPERTS)
        for name, shape in SHAPES.items()
    }


def model_of_rank(
    tensors: dict[str, torch.Tensor], *, layout: str, dtype: torch.dtype, rank: int = 0, size: int = 1
) -> Any:
    """Return a layer of one rank, packed as in vLLM; all layouts but "plain" pad the width to a multiple of 32."""
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    width = WIDTH // size
    padding = 0 if layout == "plain" else -width % 32

    def stacked(name: str, dim: int) -> torch.Tensor:
        parts = [tensors[f"mlp.experts.{expert}.{name}.weight"].chunk(size, dim)[rank] for expert in range(NUM_EXPERTS)]
        pad = (0, padding) if dim else (0, 0, 0, padding)
        return torch.nn.functional.pad(torch.stack(parts).to(dtype), pad)

    halves = [stacked("gate_proj", 0), stacked("up_proj", 0)]
    weights = torch.cat(halves[:: -1 if layout == SWAPPED else 1], 1), stacked("down_proj", 1)
    if layout in {"vec", "amx"}:
        weights = tuple(cpu_prepack_moe_weight(weight, layout) for weight in weights)
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(weight, requires_grad=False) for weight in weights)
    backends = {"plain": UnquantizedMoeBackend.TRITON, SWAPPED: UnquantizedMoeBackend.FLASHINFER_CUTLASS}
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa=layout, _use_zentorch=False))
    layer.quant_method = SimpleNamespace(
        unquantized_backend=backends.get(layout, UnquantizedMoeBackend.CPU),
        moe_kernel=kernel,
        topk_indices_dtype=None,
        apply=apply_swapped,
    )
    layer.moe_config = SimpleNamespace(
        tp_rank=rank,
        tp_size=size,
        intermediate_size_per_partition_unpadded=width,
        hidden_dim_unpadded=HIDDEN,
        hidden_dim=HIDDEN + (16 if layout == SWAPPED else 0),
        max_num_tokens=24,
    )
    layer.local_num_experts, layer.params_dtype = NUM_EXPERTS, dtype
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = SHAPES
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = torch.nn.Module()
    model.mlp.experts.routed_experts = layer
    return model


def apply_swapped(
    layer: Any, inputs: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *_shared: None
) -> torch.Tensor:
    """Compute an expert as a GPU kernel does, with rounding after each step."""
    assert weights.shape == ids.shape == (len(inputs), 1)
    assert len(inputs) <= layer.moe_config.max_num_tokens
    padded = [
        torch.nn.functional.pad(each, (0, inputs.shape[1] - HIDDEN)) for each in layer.w13_weight[ids[0, 0]].chunk(2)
    ]
    up, gate = (inputs @ each.T for each in padded)
    down = torch.nn.functional.pad(layer.w2_weight[ids[0, 0]], (0, 0, 0, inputs.shape[1] - HIDDEN))
    return (torch.nn.functional.silu(gate) * up) @ down.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_read_back_bit_for_bit(layout: str, dtype: torch.dtype) -> None:
    tensors = random_experts()
    model = model_of_rank(tensors, layout=layout, dtype=dtype)
    found = dict(expert_parts("mlp.experts.routed_experts", model.mlp.experts.routed_experts))
    assert found.keys() == tensors.keys()
    for name, part in found.items():
        assert torch.equal(part.read(), tensors[name].to(dtype)), name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", [*LAYOUTS, SWAPPED])
def test_ranks_together_serve_the_whole_experts(layout: str, size: int) -> None:
    new, old = random_experts(), random_experts(seed=1)
    stale = "mlp.experts.1.down_proj.weight"
    expected = {name: probe_tensor(tensor) for name, tensor in new.items()}
    for changed in (None, stale, "mlp.experts.2.up_proj.weight"):
        ranks = []
        for rank in range(size):  # the last rank serves the changed tensor
            held = {**new, changed: old[changed]} if changed and rank == size - 1 else new
            model = model_of_rank(held, layout=layout, dtype=torch.float32, rank=rank, size=size)
            assert dict(noted(model, new.items())) == new
            ranks.append(live_parts(model))
        joined = join_parts(ranks, expected)
        wrong = {name for name, probe in joined.items() if np.isnan(probe).any()}
        named = {
            name for name in new if name == changed or (layout == SWAPPED and expert_of(name) == expert_of(changed))
        }
        assert wrong == named
        for name in new.keys() - wrong:
            np.testing.assert_allclose(joined[name], expected[name], atol=1e-5, err_msg=name)


def test_experts_of_the_start_are_what_they_were_when_first_read() -> None:
    """Adapter updates contain no experts, so the first read is the reference."""
    tensors = random_experts()
    model = model_of_rank(tensors, layout="vec", dtype=torch.float32)
    served = live_parts(model)
    assert not [name for name, (part,) in served.items() if not np.allclose(part.values, probe_tensor(tensors[name]))]
    bits = model.mlp.experts.routed_experts.w2_weight.data[1].view(-1).view(torch.int32)
    bits[bits.nonzero()[0]] ^= 1
    wrong = {name for name, (part,) in live_parts(model).items() if np.isnan(part.values).any()}
    assert wrong == {"mlp.experts.1.down_proj.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_that_are_asked_may_round_after_each_step(dtype: torch.dtype) -> None:
    """Some inputs have weights 30 times as large as others, zero, or almost zero."""
    for seed in range(5):
        tensors = random_experts(seed)
        for name, tensor in tensors.items():
            tensor *= 0.02
            if "down" not in name:
                tensor[:, :3] *= 30
                tensor[:, 3] = 0
                tensor[:, 4] *= 1e-6
        model = model_of_rank(tensors, layout=SWAPPED, dtype=dtype)
        assert dict(noted(model, tensors.items())) == tensors
        assert not [name for name, (part,) in live_parts(model).items() if np.isnan(part.values).any()]


def test_an_expert_that_is_asked_is_stale_however_little_has_changed() -> None:
    old, new = random_experts(), random_experts()
    stale = "mlp.experts.1.down_proj.weight"
    new[stale][3, 4] *= 1 + 2**-7
    model = model_of_rank(old, layout=SWAPPED, dtype=torch.bfloat16)
    for arriving, named in ((old, []), (old, []), (new, [stale]), (old, [])):
        assert dict(noted(model, arriving.items())) == arriving
        assert [name for name, (part,) in live_parts(model).items() if np.isnan(part.values).any()] == named
