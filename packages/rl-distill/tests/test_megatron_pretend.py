"""The learner's whole step on a pretend accelerator: every layout, family, back end and recomputation as on a GPU.

One process is one rank of any layout, with collectives that do nothing. Nothing is computed: `test_megatron_parallel`
compares values. A wait of the host fails unless `pretend_rank.LISTED` has a reason for it, and so does an operation on
tensors of both devices. `pytest -v -m "soak or not soak"` lists the whole matrix; CI runs a part of it.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pretend_rank
import pytest
from pretend_rank import LISTED, RARE

from rl_distill.architecture.memory import rank_memory, step_memory
from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.checkpoint import critic_shapes
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

Ask = Callable[..., dict[str, Any]]

BASE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}

QWEN3 = {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN2 = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8}

DENSE: dict[str, dict[str, Any]] = {
    "Qwen3": {"policy": QWEN3},
    "Llama": {"policy": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}},
    "Qwen2": {"policy": QWEN2},
    "Qwen2 tied": {"policy": {**QWEN2, "tie_word_embeddings": True}},
    "critic": {"policy": QWEN3, "objective": "value"},
    "LoRA": {"policy": QWEN3, "lora": 4},
}

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GLM = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-MoE": {"policy": {**BASE, **MIXTURE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}},
    "GLM-MoE": {"policy": {**BASE, **GLM, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}},
}

LAYOUTS = {
    "one": ParallelOptions(),
    "TP2": ParallelOptions(ranks=2, tensor=2),
    "TP2+SP": ParallelOptions(ranks=2, tensor=2, sequence=True),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "PP2 interleaved": ParallelOptions(ranks=2, pipeline=2, virtual_pipeline=2),
    "CP2": ParallelOptions(ranks=2, context=2),
    "DP2 distributed optimizer": ParallelOptions(ranks=2, distributed_optimizer=True),
    "8 mixed": ParallelOptions(ranks=8, tensor=2, sequence=True, pipeline=2, context=2, distributed_optimizer=True),
}

ONE = LAYOUTS["one"]
MIXTURE_LAYOUTS = {
    **{name: layout for name, layout in LAYOUTS.items() if layout.tensor == 1 or layout.sequence},
    "EP2": ParallelOptions(ranks=2, expert=2),
    "TP2+SP EP2 ETP1": ParallelOptions(ranks=2, tensor=2, sequence=True, expert=2, expert_tensor=1),
    "8 mixed experts": ParallelOptions(ranks=8, tensor=2, sequence=True, pipeline=2, expert=4, expert_tensor=1),
}

RECOMPUTES = ("none", "selective", "full")


def matrix(families: dict[str, Any], layouts: dict[str, ParallelOptions]) -> list[Any]:
    """Return all cases; every sixth is no soak test: six families cover each pair of layout and recomputation."""
    return [
        pytest.param(
            layout, family, how, id=f"{layout}-{family}-{how}", marks=[pytest.mark.soak] if (i + j + k) % 6 else []
        )
        for i, layout in enumerate(layouts)
        for j, family in enumerate(families)
        for k, how in enumerate(RECOMPUTES)
    ]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return a function that sends cases to a process with one rank on the accelerator."""
    command, folder = [sys.executable, "-m", "pretend_steps"], Path(pretend_rank.__file__).parent
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def answer(policy: dict[str, Any], layout: ParallelOptions = ONE, **case: Any) -> dict[str, Any]:
            options = {"dtype": "bfloat16", "kernels": "fused", **case.pop("options", {})}
            defaults = {"rank": 0, "objective": "policy", "lora": 0, "steps": 1, "is_large": False}
            defaults |= {"replays": False, "min_shared": 0, "length": 0, "backend": "auto", "is_packed": True}
            told = {**defaults, **case, "policy": policy, "layout": asdict(layout), "options": options}
            child.stdin.write(json.dumps(told) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            assert line, f"the process ended with {child.wait()}"
            found: dict[str, Any] = json.loads(line)
            return found

        yield answer
        child.stdin.close()


def check_rank(found: dict[str, Any], case: dict[str, Any], layout: ParallelOptions, rank: int) -> None:
    """Check the devices, dtypes, shapes and bytes of a rank."""
    assert "error" not in found, found["error"]
    assert found["devices"] == ["pretend"]
    assert found["dtypes"]["gradients"] == found["dtypes"]["optimizer"] == ["torch.float32"]
    is_glm = case["policy"]["model_type"] == "glm4_moe"
    assert set(found["dtypes"]["weights"]) == {"torch.bfloat16", *(["torch.float32"] if is_glm else [])}
    assert all(name.endswith("router.expert_bias") for name in found["float32"])
    check_pieces(found, case, is_whole=layout.ranks == 1)
    check_memory(found, case, layout, rank)


def check_pieces(found: dict[str, Any], case: dict[str, Any], *, is_whole: bool) -> None:
    """Check that exported pieces lie within the tensors of the policy's folder, and cover them if there is one rank."""
    config = parse_policy_config(case["policy"])
    shapes = critic_shapes(config) if case.get("objective") == "value" else tensor_shapes(config)
    for name, shape, offsets, sizes in found["pieces"]:
        assert tuple(shape) == shapes[name]
        assert all(0 < size <= all_ - first for all_, first, size in zip(shape, offsets, sizes, strict=True))
    if is_whole:
        assert {name: tuple(sizes) for name, _, _, sizes in found["pieces"]} == shapes


def check_memory(found: dict[str, Any], case: dict[str, Any], layout: ParallelOptions, rank: int) -> None:
    """Check the memory of a rank's persistent tensors against the plan."""
    kind: Any = "critic" if case.get("objective") == "value" else "policy"
    config, lora = parse_policy_config(case["policy"]), LoraOptions(rank=case.get("lora", 0))
    stages = rank_memory(config, layout, dtype="bfloat16", kind=kind, lora=lora)
    planned = stages[rank // (layout.ranks // layout.pipeline)]
    # A distributed optimizer pads its buffers and shards them into contiguous ranges.
    tolerance = 0.3 if layout.distributed_optimizer else 0.0
    weights, gradients, optimizer = found["memory"]
    assert weights == planned.weights
    assert gradients == pytest.approx(planned.gradients, rel=tolerance)
    # Before the first step the optimizer has float32 weights, but no moments.
    assert optimizer == pytest.approx(planned.optimizer / (1 if "is_applied" in found else 3), rel=tolerance)


@pytest.mark.parametrize(("layout", "family", "how"), [*matrix(DENSE, LAYOUTS), *matrix(MIXTURES, MIXTURE_LAYOUTS)])
def test_a_step_takes_a_gpus_way(layout: str, family: str, how: str, ask: Ask) -> None:
    case, parallel = (DENSE | MIXTURES)[family], (LAYOUTS | MIXTURE_LAYOUTS)[layout]
    if parallel.virtual_pipeline > 1:
        case = {**case, "policy": {**case["policy"], "num_hidden_layers": 4}}
    rank = parallel.ranks - 1
    found = ask(layout=parallel, rank=rank, options={"recompute": how}, **case)
    check_rank(found, case, parallel, rank)


@pytest.mark.parametrize("head", ["policy", "value"])
def test_the_objective_is_given_float32_on_the_gpu(head: str, ask: Ask) -> None:
    seen = ask(QWEN3, objective=head)["seen"]
    expected = {
        "values pretend:0 torch.float32",
        "advantages pretend:0 torch.float32",
        "loss_mask pretend:0 torch.bool",
    }
    assert expected <= set(seen)
    assert ("entropy pretend:0 torch.float32" in seen) is (head == "policy")
    assert [one for one in seen if " pretend:0 " in one] == seen


@pytest.mark.parametrize(
    ("objective", "error", "reason"),
    [
        ("reads a number", "WaitError", "_local_scalar_dense"),
        ("selects by a mask", "WaitError", "aten.index.Tensor"),
        ("looks on the host", "WaitError", "_to_copy"),
        ("copies and waits", "WaitError", "_to_copy"),
        ("mixes devices", "FakeTensorDeviceMismatchError", "pretend:0 and cpu"),
    ],
)
def test_what_waits_for_the_gpu_within_a_step_is_found(objective: str, error: str, reason: str, ask: Ask) -> None:
    found = ask(QWEN3, objective=objective)["error"]
    assert error in found
    assert reason in found.partition(error)[2]


FSDP = ParallelOptions(ranks=2, shard_weights=True)
RUNS: dict[str, dict[str, Any]] = {
    "Qwen3": {"policy": QWEN3, "layout": LAYOUTS["8 mixed"]},
    "critic": {"policy": QWEN3, "objective": "value"},
    "Muon": {"policy": QWEN3, "options": {"algorithm": "muon"}},
    "optimizer on the host": {"policy": QWEN3, "options": {"offload_optimizer": True}},
    "LoRA": {"policy": QWEN3, "lora": 4},
    "mixture": {**MIXTURES["Qwen3-MoE"], "layout": MIXTURE_LAYOUTS["EP2"], "replays": True},
    "transformers": {"policy": QWEN3, "backend": "transformers", "min_shared": 4},
    "transformers, LoRA": {"policy": QWEN3, "backend": "transformers", "lora": 4},
    "transformers, divided": {"policy": QWEN3, "backend": "transformers", "layout": FSDP},
    "transformers, divided, padded": {"policy": QWEN3, "backend": "transformers", "layout": FSDP, "is_packed": False},
    "transformers, divided critic": {"policy": QWEN3, "backend": "transformers", "layout": FSDP, "objective": "value"},
}
"""Learners that take two steps; between them, they publish, save, load and offload, and adapters train in turn."""


@pytest.fixture(scope="module")
def runs(ask: Ask) -> dict[str, dict[str, Any]]:
    return {name: ask(**case, steps=2) for name, case in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_waits_only_where_a_reason_is_listed(name: str, runs: dict[str, dict[str, Any]]) -> None:
    found = runs[name]
    assert "error" not in found, found["error"]
    assert found["is_applied"] in (True, None)
    assert found["devices"] == ["pretend"]


def test_every_listed_wait_happens(runs: dict[str, dict[str, Any]]) -> None:
    found = {tuple(place) for of_run in runs.values() for place in of_run["reads"]}
    assert found == {(place.file, place.function) for place in LISTED if place not in RARE}


@pytest.mark.parametrize("layout", ["one", "TP2"])
@pytest.mark.parametrize("objective", ["distillation", "distillation and rewards", "whole distributions"])
def test_learning_from_teachers_waits_for_nothing(objective: str, layout: str, ask: Ask) -> None:
    assert ask(QWEN3, LAYOUTS[layout], objective=objective).get("error") is None


@pytest.mark.parametrize("layout", ["one", "CP2", "EP2"])
def test_replayed_experts_wait_for_nothing(layout: str, ask: Ask) -> None:
    case, parallel = MIXTURES["Qwen3-MoE"], MIXTURE_LAYOUTS[layout]
    assert ask(**case, layout=parallel, replays=True).get("error") is None


@pytest.mark.parametrize("layout", ["one", "TP2+SP", "CP2"])
def test_shared_prefixes_wait_for_nothing(layout: str, ask: Ask) -> None:
    found = ask(QWEN3, LAYOUTS[layout], min_shared=4)
    check_rank(found, {"policy": QWEN3}, LAYOUTS[layout], 0)
    assert found["computed_tokens"] == 6 + 3 * 10


LARGE = {
    **BASE,
    **MIXTURE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Qwen3-30B-A3B."""

QWEN3_8B = {
    **QWEN3,
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("policy", "layout", "how"),
    [
        (QWEN3_8B, ONE, "none"),
        (QWEN3_8B, ParallelOptions(ranks=8, tensor=4, sequence=True, distributed_optimizer=True), "full"),
        (QWEN3_8B, LAYOUTS["CP2"], "selective"),
        (LARGE, ParallelOptions(ranks=8, expert=8, distributed_optimizer=True), "full"),
    ],
    ids=["8B", "8B TP4+SP full", "8B CP2 selective", "30B EP8 full"],
)
def test_the_peak_of_a_step_is_planned(policy: dict[str, Any], layout: ParallelOptions, how: str, ask: Ask) -> None:
    """The peak of torch's MemTracker is as planned within 3 %; that of all layers follows from two and three."""
    options = LearnerOptions(dtype="bfloat16", recompute=how, micro_batch_tokens=8192)  # type: ignore[arg-type]
    measured, planned = [], []
    for num_layers in (2, 3):
        of_few = {**policy, "num_hidden_layers": num_layers}
        length = options.micro_batch_tokens * layout.context // 4
        found = ask(of_few, layout, options={"recompute": how}, steps=0, is_large=True, length=length)
        assert "error" not in found, found["error"]
        measured.append(found["step_memory"])
        config = parse_policy_config(of_few)
        (kept,) = rank_memory(config, layout, dtype="bfloat16")
        (needed,) = step_memory(config, layout, options)
        planned.append(sum(kept) + needed)

    def of_all(two: int, three: int) -> int:
        return two + (policy["num_hidden_layers"] - 2) * (three - two)

    assert of_all(*planned) == pytest.approx(of_all(*measured), rel=0.03)
    assert planned[0] == pytest.approx(measured[0], rel=0.03)  # where layers weigh less


def test_a_gpu_gets_its_own_kernels(ask: Ask) -> None:
    fused = set(ask(**MIXTURES["Qwen3-MoE"])["operations"])
    plain = set(ask(QWEN3, options={"kernels": "plain"})["operations"])
    own = {"torch_attn._varlen_attn", "torch_attn._varlen_attn_backward", "aten._grouped_mm"}
    assert own <= fused
    assert not own & plain


@pytest.mark.parametrize(
    ("num_layers", "layout", "steps"),
    [
        (48, ParallelOptions(ranks=64, tensor=4, sequence=True, pipeline=4, expert=8, expert_tensor=1), 0),
        (8, ParallelOptions(), 1),
    ],
)
def test_a_large_mixture_takes_what_is_planned(num_layers: int, layout: ParallelOptions, steps: int, ask: Ask) -> None:
    policy, rank = {**LARGE, "num_hidden_layers": num_layers}, layout.ranks - 1
    found = ask(policy, layout, rank=rank, is_large=True, steps=steps, options={"recompute": "full"})
    check_rank(found, {"policy": policy}, layout, rank)
