"""Every family: logits equal transformers', and a folder survives a round trip."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equal_tensors import different_tensors
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open

from rl_core.data.ragged import offsets_of
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.hf_folder import PolicyTensors, write_policy_folder
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout, rotary_frequencies
from rl_distill.megatron.convert import Shard, blocks_of
from rl_distill.megatron.model_spec import block_spec, transformer_config
from rl_distill.options import ParallelOptions

WritePolicy = Callable[..., Path]
LENGTHS = [9, 1, 30, 14]

pytestmark = pytest.mark.usefixtures("one_rank")


def keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build(policy_dir: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> GPTModel:
    """Return megatron's model of a folder, on one rank."""
    policy = parse_policy_config(read_policy_config(policy_dir))
    config = transformer_config(policy, dtype=dtype, init_method=keep, **changes)
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=policy.vocab_size,
        max_sequence_length=policy.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=policy.is_tied,
    )
    tensors = PolicyTensors(policy_dir, policy)
    for block in blocks_of(dict(model.named_parameters()), policy, Shard(layers=range(policy.num_layers))):
        block.write(tensors.read(block.name, block.offsets, block.sizes, dtype=dtype))
    return model


def random_rows(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 40, (length,), generator=generator) for length in lengths]


def layout_of(policy: PolicyConfig, lengths: list[int], device: torch.device) -> PackedLayout:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return packed_layout(
        positions.to(device),
        offsets_of(lengths),
        frequencies=rotary_frequencies(policy).to(device),
        head_counts=(policy.num_heads, policy.num_key_value_heads),
    )


def packed_logits(model: GPTModel, policy_dir: Path, rows: list[torch.Tensor]) -> torch.Tensor:
    layout = layout_of(parse_policy_config(read_policy_config(policy_dir)), [len(row) for row in rows], rows[0].device)
    ids = torch.cat(rows)[None]
    return model(ids, torch.zeros_like(ids), None, packed_seq_params=layout)[0]


def reference_logits(policy_dir: Path, rows: list[torch.Tensor]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])


def stored(policy_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(policy_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict


def assert_logits_agree(policy_dir: Path) -> None:
    rows = random_rows(LENGTHS)
    with torch.no_grad():
        found = packed_logits(build(policy_dir), policy_dir, rows)
    torch.testing.assert_close(found, reference_logits(policy_dir, rows), rtol=0, atol=1e-5)


def test_logits_are_those_of_transformers(family_policy: Path):
    assert_logits_agree(family_policy)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3ForCausalLM", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e4}}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("LlamaForCausalLM", {"head_dim": 16}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "tie_word_embeddings": True}),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 4}),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 48}),
        ("Qwen3MoeForCausalLM", {"router_aux_loss_coef": 0.01, "head_dim": 24}),
        ("Glm4MoeForCausalLM", {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False}),
        ("Glm4MoeForCausalLM", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}),
        ("Glm4MoeForCausalLM", {"num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True}),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.25}),
        ("Glm4MoeForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ("Glm4MoeForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 2}),
    ],
)
def test_logits_of_variants_are_those_of_transformers(
    architecture: str, changes: dict[str, Any], policy_writer: WritePolicy, tmp_path: Path
):
    assert_logits_agree(policy_writer(tmp_path, architecture, **changes))


def test_a_folder_comes_back_bit_for_bit_and_loads_in_transformers(family_policy: Path, tmp_path: Path):
    model, config_json = build(family_policy), read_policy_config(family_policy)
    policy = parse_policy_config(config_json)
    blocks = blocks_of(dict(model.named_parameters()), policy, Shard(layers=range(policy.num_layers)))

    whole = {name: torch.empty(shape) for name, shape in tensor_shapes(policy).items()}
    for block in blocks:
        whole[block.name][tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))] = (
            block.read()
        )
    write_policy_folder(tmp_path, config_json, whole.items(), source_dir=family_policy, max_shard_bytes=20_000)

    expected, found = dict(stored(family_policy)), dict(stored(tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "config.json").read_text()) == config_json
    assert (tmp_path / "tokenizer_config.json").read_text() == (family_policy / "tokenizer_config.json").read_text()
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    rows = random_rows([7])
    assert torch.equal(reference_logits(tmp_path, rows), reference_logits(family_policy, rows))


def test_recomputed_layers_give_the_same_gradients(family_policy: Path):
    rows = random_rows(LENGTHS)
    grads = []
    for recompute in (False, True):
        model = build(family_policy, recompute=recompute)
        packed_logits(model, family_policy, rows).logsumexp(-1).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})

    assert different_tensors(grads[1], grads[0]) == []


def test_gradients_are_those_of_transformers(family_policy: Path):
    rows = random_rows(LENGTHS)
    model, policy = build(family_policy), parse_policy_config(read_policy_config(family_policy))
    packed_logits(model, family_policy, rows).log_softmax(-1)[:, 3].mean().backward()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        family_policy, dtype=torch.float32, trust_remote_code=False
    )
    torch.cat([reference(row[None]).logits[0] for row in rows]).log_softmax(-1)[:, 3].mean().backward()

    expected = {}
    for name, parameter in reference.named_parameters():
        prefix, _, joined = name.rpartition(".experts.")  # transformers joins the experts of a layer
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(joined)
        if parts is None:
            expected[name] = parameter.grad
            continue
        for expert, matrix in enumerate(parameter.grad):
            for part, grad in zip(parts, matrix.chunk(len(parts)), strict=True):
                expected[f"{prefix}.experts.{expert}.{part}_proj.weight"] = grad
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    blocks = blocks_of(grads, policy, Shard(layers=range(policy.num_layers)))
    assert {block.name for block in blocks} == expected.keys()
    for block in blocks:
        torch.testing.assert_close(block.read(), expected[block.name], rtol=1e-4, atol=3e-6, msg=block.name)


def test_the_configuration_says_what_the_layout_is(family_policy: Path):
    policy = parse_policy_config(read_policy_config(family_policy))
    parallel = ParallelOptions(ranks=8, tensor=2, pipeline=2, virtual_pipeline=1, context=2, sequence=True)

    config = transformer_config(policy, dtype=torch.bfloat16, init_method=None, parallel=parallel, recompute=True)

    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert config.virtual_pipeline_model_parallel_size is None
    assert (config.context_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (1, 2)
    assert config.pipeline_dtype == torch.bfloat16


def test_only_the_layer_before_the_head_leaves_tokens_out(family_policy: Path, monkeypatch: pytest.MonkeyPatch):
    policy = parse_policy_config(read_policy_config(family_policy))
    config = transformer_config(policy, dtype=torch.float32, init_method=None)

    def is_last():
        return [spec.params["is_last"] for spec in block_spec(config).layer_specs]

    assert is_last() == [False, True]
    monkeypatch.setattr(config, "sequence_parallel", True)
    assert not any(is_last())
    monkeypatch.setattr(config, "sequence_parallel", False)
    monkeypatch.setattr(config, "pipeline_model_parallel_size", 2)  # this process is the first of two stages
    assert is_last() == [False]


def test_bfloat16_is_as_exact_as_in_transformers(family_policy: Path):
    rows = random_rows(LENGTHS)
    exact = reference_logits(family_policy, rows)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        family_policy, dtype=torch.bfloat16, trust_remote_code=False
    )
    with torch.no_grad():
        expected = torch.cat([reference(row[None]).logits[0] for row in rows]).float()
        found = packed_logits(build(family_policy, dtype=torch.bfloat16), family_policy, rows).float()

    assert (found - exact).abs().mean() < 1.5 * (expected - exact).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_on_a_gpu_are_those_of_transformers(family_policy: Path):
    rows = random_rows(LENGTHS)
    model = build(family_policy).cuda()

    with torch.no_grad():
        found = packed_logits(model, family_policy, [row.cuda() for row in rows])

    torch.testing.assert_close(found.cpu(), reference_logits(family_policy, rows), rtol=0, atol=1e-4)
