"""Run cases, read and written as JSON lines: steps of one rank of a learner on the pretend accelerator."""

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from pretend_rank import become_rank, build, install, peak_memory, pretending
from torch import Tensor

from rl_core.data import Batch, Ragged, RowKey
from rl_core.data.ragged import offsets_of
from rl_core.devices import own_device
from rl_core.weights import digest_tensors
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.learner import FIRST_ADAPTER
from rl_distill.megatron.rank_batches import RankShare
from rl_distill.megatron.rank_tensors import Exported
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.setup import ModelPlan
from rl_distill.objectives import (
    DistillationObjective,
    DistillationObjectiveOptions,
    PolicyObjectiveOptions,
    policy_objective,
)
from rl_distill.objectives.micro_batches import comparison_of
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.prefixes import ROUTED_EXPERTS
from rl_distill.stepping import open_policy

ROWS = (16, 16, 16)
"""Tokens of each row of a micro-batch, a multiple of the number of shares."""

COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")

TOP_K = 3

POLICY = policy_objective(PolicyObjectiveOptions(entropy_coefficient=0.01, kl_coefficient=0.1, correction="token"))

OBJECTIVES: dict[str, Any] = {
    "policy": POLICY,
    "distillation": DistillationObjective(DistillationObjectiveOptions()),
    "distillation and rewards": DistillationObjective(DistillationObjectiveOptions(), POLICY),
    "whole distributions": DistillationObjective(DistillationObjectiveOptions(distribution="full")),
    "value": lambda values, _, micro: ((values.square() * micro.columns["loss_weights"]).sum(), {}),
    # Errors that an objective can make.
    "reads a number": lambda values, _, micro: (values.sum() * float(values.sum()), {}),
    "selects by a mask": lambda values, _, micro: (values[micro.columns["loss_mask"]].sum(), {}),
    "mixes devices": lambda values, _, micro: ((values * torch.ones(len(values))).sum(), {}),
    "copies and waits": lambda values, _, micro: ((values * torch.ones(len(values)).to(values.device)).sum(), {}),
    "looks on the host": lambda values, _, micro: (values.sum() + values.detach().cpu().sum().item(), {}),
}


def make_share(
    num_packs: int, config: PolicyConfig, *, rows: Sequence[int] = ROWS, replays: bool = False, min_shared: int = 0
) -> RankShare:
    """Return micro-batches of equal rows, with every column that an objective reads.

    Args:
        num_packs: Number of micro-batches.
        config: Configuration of the policy.
        rows: Number of tokens of each row of a micro-batch.
        replays: Also add the experts that an engine chose.
        min_shared: Minimum number of shared tokens that are computed once; if above 0, all rows have the same prompt.
    """
    lengths = tuple(rows) * num_packs
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    mask = np.arange(total) - np.repeat(offsets[:-1], lengths) >= 2
    values: dict[str, Any] = {name: np.full(total, -0.5, dtype=np.float32) for name in COLUMNS}
    positions = np.arange(total) - np.repeat(offsets[:-1], lengths)
    number = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.where(positions < 6, positions, positions + number) % 40
    values["input_ids"] = ids.astype(np.int32)
    values["loss_mask"] = mask
    values["loss_weights"] = (mask / mask.sum()).astype(np.float32)
    values["teacher_logprobs"] = np.full((total, TOP_K + 1), -2.0, dtype=np.float32)
    values["teacher_ids"] = np.stack([ids, *(np.full(total, number) for number in range(TOP_K))], -1).astype(np.int32)
    values["teacher_index"] = np.zeros(total, dtype=np.int16)
    values["teacher_hidden"] = np.zeros((total, config.hidden_size), dtype=np.float32)
    if replays and config.mixture is not None:
        chosen = np.arange(config.mixture.top_k, dtype=np.int16)
        values[ROUTED_EXPERTS] = np.broadcast_to(chosen, (total, config.num_layers, len(chosen))).copy()
    keys = [RowKey("prompt" if min_shared else f"prompt{row}", row, 0) for row in range(len(lengths))]
    batch = Batch(keys, {name: Ragged(column, offsets) for name, column in values.items()})
    return RankShare(batch=batch, sizes=(len(rows),) * num_packs, min_shared=min_shared)


class Watched:
    """An objective that records its arguments."""

    def __init__(self, objective: Any) -> None:
        self._objective, self.seen = objective, set[str]()
        self.comparison = comparison_of(objective)

    def __call__(self, values: Tensor, entropy: Tensor | None, micro: Any) -> Any:
        given = {"values": values, "entropy": entropy, **micro.columns}
        self.seen |= {f"{name} {one.device} {one.dtype}" for name, one in given.items() if one is not None}
        return self._objective(values, entropy, micro)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Build a rank, score, train and export; return what was observed."""
    parallel, head = ParallelOptions(**case["layout"]), "value" if case["objective"] == "value" else "policy"
    source = open_policy(case["policy"], is_critic=head == "value", backend=case["backend"])
    options, lora = LearnerOptions(**case["options"]), LoraOptions(rank=case["lora"])
    plan = ModelPlan(source=source, options=options, parallel=parallel, head=head, lora=lora)  # type: ignore[arg-type]
    rows = (case["length"],) * 4 if case["length"] else ROWS
    share = make_share(
        parallel.pipeline, source.config, rows=rows, replays=case["replays"], min_shared=case["min_shared"]
    )
    length = sum(rows) // parallel.context // (parallel.tensor if parallel.sequence else 1)
    become_rank(case["rank"], parallel)
    with pretending(length=length, hidden_size=source.config.hidden_size) as mode:
        model = build(plan, is_large=case["is_large"], is_packed=case["is_packed"])
        mode.is_in_step = True
        found = _step(model, share, case["objective"]) if case["steps"] else {}
        if case["steps"] > 1:
            _between_steps(model, share, lora)
            found |= _step(model, share, case["objective"])
        if case["length"]:
            train = partial(model.train_step, share, temperature=1.0, with_entropy=True)
            model.tensors.adam.start_moments()
            found["step_memory"] = peak_memory(model, lambda: train(POLICY))
        return found | _tensors_of(model) | {"operations": sorted(mode.operations), "reads": sorted(mode.reads)}


def _step(model: RankTrainer, share: RankShare, name: str) -> dict[str, Any]:
    config = model.plan.source.config
    if name == "whole distributions":
        rows = config.vocab_size // model.plan.parallel.tensor
        model._teacher_heads = [torch.empty(rows, config.hidden_size, dtype=torch.bfloat16, device=own_device())]
    objective = Watched(OBJECTIVES[name])
    is_policy = model.plan.head == "policy"
    scored = model.score(share, temperature=1.0, top_k=TOP_K if is_policy else None)
    found = model.train_step(share, objective, temperature=0.9, with_entropy=is_policy, with_tokens=True)
    result, step = (None, None) if found is None else found
    return {
        "scored": None if scored is None else {name: (list(of.shape), str(of.dtype)) for name, of in scored.items()},
        "is_applied": None if step is None else step.is_applied,
        "computed_tokens": None if result is None else result.computed_tokens,
        "seen": sorted(objective.seen),
    }


def _between_steps(model: RankTrainer, share: RankShare, lora: LoraOptions) -> None:
    """Do what a run does between two steps: publish, save, offload, and train adapters in turn."""
    if lora.rank:
        model.score(share, temperature=1.0, weights="reference")
        model.select_adapter("other", lora=lora, seed=1, rank=lora.rank)
        model.select_adapter(FIRST_ADAPTER, lora=lora)
    kinds: tuple[Exported, ...] = ("base", "adapter", "weights") if lora.rank else ("weights",)
    for kind in kinds:
        model.tensors.export(kind, on_host=True)
    if model.plan.head == "policy":
        digest_tensors({one.rectangle.name: one.read() for one in model.tensors.held()}, kind="sums")
    states, _ = model.tensors.empty_state()
    model.tensors.state_pieces()
    model.load_state(states, step=model.step)
    model.offload()
    model.reload()


def _tensors_of(model: RankTrainer) -> dict[str, Any]:
    """Return devices, dtypes and bytes of a model's tensors, and the exported pieces."""
    exported = model.tensors.export("weights", on_host=False)
    kept = dict(zip(("weights", "gradients", "optimizer"), model.tensors.kept(), strict=True))
    named = [pair for chunk in model._chunks for pair in chunk.named_parameters()]
    # Megatron's Float16Module and DistributedDataParallel each put "module." before a name.
    float32 = {name.rpartition("module.")[2] for name, one in named if one.dtype == torch.float32}
    return {
        "devices": sorted({one.device.type for one in chain(*kept.values(), (piece.tensor for piece in exported))}),
        "dtypes": {kind: sorted({str(one.dtype) for one in tensors}) for kind, tensors in kept.items()},
        "float32": sorted(float32),
        "memory": list(model.memory()),
        "pieces": [(one.name, one.shape, one.offsets, one.tensor.shape) for one in exported],
    }


def main() -> None:
    """Answer each case with its result or traceback."""
    warnings.simplefilter("ignore")
    install()
    for line in sys.stdin:
        try:
            found = run_case(json.loads(line))
        except Exception:
            found = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
