"""Live weights assembled from ranks, compared with the probe of the whole tensor, for one to eight ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rl_core.weights.digests import probe_tensor
from rl_rollout.engines.vllm.live_weights import LivePart, join_parts, live_parts

NUM_HEADS, NUM_KV_HEADS, HEAD, HIDDEN, MIDDLE, VOCAB = 8, 2, 3, 8, 16, 13
SHAPES = {
    "attn.q_proj.weight": (NUM_HEADS * HEAD, HIDDEN),
    "attn.k_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
    "attn.v_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
    "attn.q_proj.bias": (NUM_HEADS * HEAD,),
    "attn.k_proj.bias": (NUM_KV_HEADS * HEAD,),
    "attn.v_proj.bias": (NUM_KV_HEADS * HEAD,),
    "attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD),
    "attn.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (MIDDLE, HIDDEN),
    "mlp.up_proj.weight": (MIDDLE, HIDDEN),
    "router.weight": (4, HIDDEN),
    "norm.weight": (HIDDEN,),
    "embed.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
}


class Plain:
    """A quantization method that does not quantize."""

    def apply(self, module: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ module.weight.T


def layer(kind: type[torch.nn.Module], weight: torch.Tensor, bias: torch.Tensor | None = None, **fields: Any) -> Any:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    module.bias = None if bias is None else torch.nn.Parameter(bias.contiguous(), requires_grad=False)
    for name, value in {"quant_method": Plain(), **fields}.items():
        setattr(module, name, value)
    return module


def shard(tensor: torch.Tensor, rank: int, size: int, *, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank]


def model_of_rank(tensors: dict[str, torch.Tensor], rank: int, size: int) -> torch.nn.Module:
    """Return the layers of one rank, split as in vLLM."""
    copies = max(1, size // NUM_KV_HEADS)
    place = {"tp_rank": rank, "tp_size": size}

    def part(name: str) -> torch.Tensor:
        is_kv = ".k_proj" in name or ".v_proj" in name
        return shard(tensors[name], rank // copies, size // copies) if is_kv else shard(tensors[name], rank, size)

    model = torch.nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.attn, model.mlp = torch.nn.Module(), torch.nn.Module()
    qkv = [part(f"attn.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
    biases = [part(f"attn.{name}.bias") for name in ("q_proj", "k_proj", "v_proj")]
    sizes = [len(one) for one in qkv]
    fields = {"input_size": HIDDEN, "output_partition_sizes": sizes, "num_kv_head_replicas": copies, **place}
    model.attn.qkv_proj = layer(QKVParallelLinear, torch.cat(qkv), torch.cat(biases), **fields)
    out = shard(tensors["attn.o_proj.weight"], rank, size, dim=1)
    fields = {"input_size": NUM_HEADS * HEAD, "input_size_per_partition": NUM_HEADS * HEAD // size, **place}
    model.attn.o_proj = layer(RowParallelLinear, out, tensors["attn.o_proj.bias"], **fields)
    pair = [part("mlp.gate_proj.weight"), part("mlp.up_proj.weight")]
    fields = {"input_size": HIDDEN, "output_partition_sizes": [MIDDLE // size] * 2, **place}
    model.mlp.gate_up_proj = layer(MergedColumnParallelLinear, torch.cat(pair), **fields)
    fields = {"input_size": HIDDEN, "output_partition_sizes": [4], **place}
    model.router = layer(ReplicatedLinear, tensors["router.weight"], **fields)
    model.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
    model.norm.weight = torch.nn.Parameter(tensors["norm.weight"].clone())
    model.embed = vocabulary(VocabParallelEmbedding, tensors["embed.weight"], rank, size)
    model.lm_head = vocabulary(ParallelLMHead, tensors["lm_head.weight"], rank, size)
    return model


def vocabulary(kind: type[torch.nn.Module], tensor: torch.Tensor, rank: int, size: int) -> Any:
    """Return a rank's share of the rows, padded to 16; the padding holds values that must not be used."""
    rows = 16 // size
    start = min(rank * rows, VOCAB)
    own = tensor[start : start + rows]
    padded = torch.cat([own, torch.full((rows - len(own), HIDDEN), 1e6)])
    indices = SimpleNamespace(num_org_elements=len(own), org_vocab_start_index=start)
    return layer(kind, padded, embedding_dim=HIDDEN, org_vocab_size=VOCAB, shard_indices=indices)


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_together_serve_the_whole_tensors(size: int) -> None:
    tensors = random_tensors()
    expected = {name: probe_tensor(tensor) for name, tensor in tensors.items()}
    ranks = [live_parts(model_of_rank(tensors, rank, size)) for rank in range(size)]
    joined = join_parts(ranks, expected)
    assert joined.keys() == SHAPES.keys()
    for name, probe in joined.items():
        np.testing.assert_allclose(probe, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_a_stale_tensor_on_any_rank_that_serves_some_of_it_shows(name: str, rank: int) -> None:
    new, old = random_tensors(), random_tensors(seed=1)
    expected = {name: probe_tensor(tensor) for name, tensor in new.items()}
    models = [model_of_rank({**new, name: old[name]} if at == rank else new, at, 4) for at in range(4)]
    joined = join_parts([live_parts(model) for model in models], expected)
    differing = [key for key, probe in joined.items() if not np.allclose(probe, expected[key], atol=1e-4)]
    assert differing == [name]


def test_a_tensor_joined_in_the_checkpoint_too_is_put_together() -> None:
    gate_up = torch.arange(8.0).reshape(8, 1)  # gate is 0 to 3, up is 4 to 7
    ranks = []
    for rank in range(2):
        model = torch.nn.Module()
        own = torch.cat([gate_up[2 * rank : 2 * rank + 2], gate_up[4 + 2 * rank : 6 + 2 * rank]])
        fields = {"input_size": 1, "output_partition_sizes": [2, 2], "tp_rank": rank, "tp_size": 2}
        model.gate_up_proj = layer(MergedColumnParallelLinear, own, **fields)
        ranks.append(live_parts(model))
    joined = join_parts(ranks, {})["gate_up_proj.weight"]
    np.testing.assert_allclose(joined, probe_tensor(gate_up), rtol=1e-6)


def test_a_joined_tensor_a_buffer_and_a_bias_of_the_head_are_live_if_the_checkpoint_names_them() -> None:
    model = model_of_rank(random_tensors(), 0, 1)
    model.register_buffer("scale", torch.tensor([2.0]))
    model.register_buffer("angles", torch.tensor([3.0]))
    model.lm_head.bias = torch.nn.Parameter(torch.arange(16.0), requires_grad=False)
    plain, wanted = live_parts(model), live_parts(model, {"scale", "mlp.gate_up_proj.weight"})
    assert wanted.keys() - plain.keys() == {"scale", "mlp.gate_up_proj.weight"}
    assert plain.keys() - wanted.keys() == {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    joined = join_parts([wanted], {})
    np.testing.assert_allclose(
        joined["mlp.gate_up_proj.weight"], probe_tensor(model.mlp.gate_up_proj.weight), rtol=1e-5, atol=1e-5
    )
    assert joined["scale"].tolist() == [2.0]
    assert joined["lm_head.bias"].tolist() == list(range(VOCAB))


def part(values: list[float], *, start: int = 0, num_rows: int = 3, is_summand: bool = False) -> LivePart:
    return LivePart(values=np.array(values, np.float32), start=start, num_rows=num_rows, is_summand=is_summand)


def test_rows_that_nobody_serves_are_not_numbers() -> None:
    joined = join_parts([{"a": [part([1.0])]}, {"a": [part([3.0], start=2)]}], {})
    np.testing.assert_array_equal(joined["a"], [1.0, np.nan, 3.0])


def test_of_differing_copies_the_worst_is_told() -> None:
    expected = {"a": np.array([1.0, 2.0, 3.0], np.float32)}
    first, second = part([1.0, 2.5, np.nan]), part([0.0, 2.0, 3.0])
    for ranks in ([first, second], [second, first]):
        np.testing.assert_array_equal(join_parts([{"a": [one]} for one in ranks], expected)["a"], [0.0, 2.5, np.nan])


def test_summands_of_ranks_add_up() -> None:
    ranks = [{"a": [part([1.0, 2.0, 3.0], is_summand=True)]}, {"a": [part([10.0, 20.0, 30.0], is_summand=True)]}]
    assert join_parts(ranks, {})["a"].tolist() == [11.0, 22.0, 33.0]
