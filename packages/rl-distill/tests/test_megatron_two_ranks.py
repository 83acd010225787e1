"""A policy split over two real ranks: each reads its part, and together they score like one rank.

Each rank runs this file as its program.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file

from rl_core.data.ragged import offsets_of
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.hf_folder import STORED_DTYPES, PolicyTensors
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout, rotary_frequencies
from rl_distill.megatron.convert import Shard, blocks_of, padded_vocab_size
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.model_spec import block_spec, transformer_config
from rl_distill.objectives.vocabulary import VocabularyPart, vocabulary_logprobs
from rl_distill.options import ParallelOptions

LENGTHS = [13, 3, 8]
TIMEOUT_S = 300

LAYOUTS: dict[str, ParallelOptions] = {
    "tensor": ParallelOptions(ranks=2, tensor=2),
    "sequence": ParallelOptions(ranks=2, tensor=2, sequence=True),
    "expert": ParallelOptions(ranks=2, expert=2),
    "sequence-expert": ParallelOptions(ranks=2, tensor=2, sequence=True, expert=2, expert_tensor=1),
}
CASES = [
    ("Qwen2ForCausalLM", "tensor", "turns"),
    ("LlamaForCausalLM", "sequence", "turns"),
    ("Qwen3MoeForCausalLM", "sequence", "turns"),
    ("Qwen3MoeForCausalLM", "sequence", "grouped"),
    ("Qwen3MoeForCausalLM", "expert", "turns"),
    ("Qwen3MoeForCausalLM", "expert", "grouped"),
    ("Qwen3MoeForCausalLM", "sequence-expert", "turns"),
    ("Glm4MoeForCausalLM", "sequence", "turns"),
    ("Glm4MoeForCausalLM", "sequence-expert", "turns"),
    ("Glm4MoeForCausalLM", "sequence-expert", "grouped"),
]
"""Architecture, layout, and computation of experts."""


def shard_of(policy: PolicyConfig) -> Shard:
    """Return this rank's shard, on a single pipeline stage."""
    return Shard(
        layers=range(policy.num_layers),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def make_layout(policy: PolicyConfig, shard: Shard) -> PackedLayout:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    heads = (policy.num_heads // shard.tensor_size, policy.num_key_value_heads // shard.tensor_size)
    layout = packed_layout(positions, offsets_of(LENGTHS), frequencies=rotary_frequencies(policy), head_counts=heads)
    if policy.mixture is not None:
        scores = torch.rand(sum(LENGTHS), policy.num_layers, policy.num_experts)
        layout.experts = scores.argsort(-1)[..., : policy.mixture.top_k]
        layout.experts[::3] = -1
    return layout


def score(
    policy_dir: Path, parallel: ParallelOptions, experts: Literal["turns", "grouped"] = "turns"
) -> dict[str, torch.Tensor]:
    """Score and differentiate on this rank; return logprobs, entropy, and gradients by name and offsets."""
    policy = parse_policy_config(read_policy_config(policy_dir))
    shard = shard_of(policy)
    config = transformer_config(
        policy,
        dtype=torch.float32,
        init_method=lambda tensor: tensor,
        parallel=parallel,
        kernels=Kernels(experts=experts),
    )
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=padded_vocab_size(policy, shard.tensor_size),
        max_sequence_length=policy.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=policy.is_tied,
        parallel_output=True,
    )
    parameters = dict(model.named_parameters())
    tensors = PolicyTensors(policy_dir, policy)
    for block in blocks_of(parameters, policy, shard):
        block.write(tensors.read(block.name, block.offsets, block.sizes, dtype=torch.float32))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        ids = torch.randint(0, policy.vocab_size, (1, sum(LENGTHS)))
        layout = make_layout(policy, shard)
    logits = model(ids, torch.zeros_like(ids), None, packed_seq_params=layout)[0]
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs, entropy = vocabulary_logprobs(logits, ids[0].flip(0), part=VocabularyPart(policy.vocab_size, group))
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    out = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "bytes": torch.tensor(tensors.num_bytes_read)}
    grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.requires_grad}
    for block in blocks_of(grads, policy, shard):
        out[f"{block.name} {','.join(map(str, block.offsets))}"] = block.read().clone()
    return out


def run_rank(rank: int, directory: Path) -> None:
    """Run every case in the folder with the policies."""
    install_cpu_compatibility()
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    for architecture, name, experts in CASES:
        parallel = LAYOUTS[name]
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        found = score(directory / architecture, parallel, experts)
        save_file(found, directory / f"{architecture}-{name}-{experts}-{rank}.safetensors")
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, policy_writer: Callable[..., Path]) -> Path:
    """Return a folder with the policies and the results of both ranks for every case."""
    directory = tmp_path_factory.mktemp("two-ranks")
    for architecture in {architecture for architecture, _, _ in CASES}:
        policy_writer(directory / architecture, architecture, vocab_size=41)  # an odd size needs padding
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", Path(__file__).stem]
    processes = [
        subprocess.Popen([*command, str(rank), str(directory)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return directory


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("architecture", "name", "experts"), CASES)
def test_two_ranks_score_and_learn_as_one(architecture: str, name: str, experts: str, scored: Path):
    policy_dir, parallel = scored / architecture, LAYOUTS[name]
    policy = parse_policy_config(read_policy_config(policy_dir))
    expected = score(policy_dir, ParallelOptions())

    ranks = [load_file(scored / f"{architecture}-{name}-{experts}-{rank}.safetensors") for rank in range(2)]

    whole = sum(math.prod(shape) for shape in tensor_shapes(policy).values()) * STORED_DTYPES["F32"]
    for found in ranks:
        for kind in ("logprobs", "entropy"):
            torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=3e-6)
        assert int(found["bytes"]) < 0.95 * whole
    assert int(expected["bytes"]) == whole
    num_compared = 0
    for found in ranks:
        for key, grad in found.items():
            tensor, _, offsets = key.partition(" ")
            is_summed_later = "norm" in tensor or "mlp.gate.weight" in tensor  # over the ranks of a sequence
            if not offsets or (is_summed_later and parallel.sequence):
                continue
            reference = expected[f"{tensor} {','.join('0' for _ in grad.shape)}"]
            starts = map(int, offsets.split(","))
            part = reference[tuple(slice(o, o + s) for o, s in zip(starts, grad.shape, strict=True))]
            # If the tokens are not split, both ranks send all of them to the experts.
            times = 2 if ".experts." in tensor and parallel.tensor == 1 else 1
            torch.testing.assert_close(grad, times * part, rtol=1e-4, atol=1e-5)
            num_compared += 1
    assert num_compared > 20


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
