"""Answers cases, JSON in and JSON out: a whole step of one rank of a learner on the meta device."""

import json
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from meta_rank import META, as_on_gpu, become_rank, build
from torch import Tensor

from rl_core.data import Batch, Ragged, RowKey
from rl_core.data.ragged import offsets_of
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.rank_shares import RankShare
from rl_distill.megatron.setup import ModelPlan
from rl_distill.objectives import PolicyObjectiveOptions, policy_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.stepping import open_policy

ROWS = (16, 16, 16)
"""Tokens of the rows of a micro-batch, a multiple of what ranks share them by."""

COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")

OBJECTIVE = policy_objective(PolicyObjectiveOptions(entropy_coefficient=0.01, kl_coefficient=0.1, correction="token"))


def make_share(num_packs: int, *, is_forest: bool) -> RankShare:
    """Micro-batches of `ROWS` each, with every column that the objective reads.

    A forest is one micro-batch, in which the rows of a prompt, every second one, begin with 8 tokens alike.
    """
    lengths = ROWS * num_packs
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    positions = np.arange(total) - np.repeat(offsets[:-1], lengths)
    mask = positions >= 2
    values: dict[str, Any] = {name: np.full(total, -0.5, dtype=np.float32) for name in COLUMNS}
    ids = np.arange(total) % 40
    values["input_ids"] = np.where(is_forest & (positions < 8), positions, ids).astype(np.int32)
    values["loss_mask"] = mask
    values["loss_weights"] = (mask / mask.sum()).astype(np.float32)
    keys = [RowKey(f"prompt{row % 2 if is_forest else row}", row, 0) for row in range(len(lengths))]
    batch = Batch(keys, {name: Ragged(column, offsets) for name, column in values.items()})
    sizes = (len(lengths),) if is_forest else (len(ROWS),) * num_packs
    return RankShare(batch=batch, sizes=sizes, min_shared=int(is_forest))


class Watched:
    """An objective that notes what it is given, and can do what no objective may."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seen = kind, set[str]()

    def __call__(self, values: Tensor, entropy: Tensor | None, micro: Any) -> Any:
        given = {"values": values, "entropy": entropy, **micro.columns}
        self.seen |= {f"{name} {one.device} {one.dtype}" for name, one in given.items() if one is not None}
        loss, sums = (values.square() * micro.columns["loss_weights"]).sum(), {}
        if self.kind == "policy":
            loss, sums = OBJECTIVE(values, entropy, micro)
        elif self.kind == "reads the loss":
            loss = loss * float(loss)
        elif self.kind == "selects by a mask":
            loss = values[micro.columns["loss_mask"]].sum()
        elif self.kind == "mixes devices":
            loss = (values * torch.ones(len(values))).sum()
        elif self.kind == "copies and waits":
            loss = (values * torch.ones(len(values)).to(values.device)).sum()
        elif self.kind == "looks on the host":
            loss = loss + values.detach().cpu().sum().item()
        return loss, sums


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Build a rank, score, train, export; what was seen meanwhile."""
    parallel, kind = ParallelOptions(**case["layout"]), case["objective"]
    head = "value" if kind == "value" else "policy"
    source = open_policy(case["policy"], is_critic=head == "value")
    options, lora = LearnerOptions(**case["options"]), LoraOptions(rank=case["lora"])
    plan = ModelPlan(source=source, options=options, parallel=parallel, head=head, lora=lora)  # type: ignore[arg-type]
    is_forest = case["is_forest"]
    share, objective = make_share(2 if is_forest else parallel.pipeline, is_forest=is_forest), Watched(kind)
    length = sum(ROWS) // parallel.context // (parallel.tensor if parallel.sequence else 1)
    become_rank(case["rank"], parallel)
    with as_on_gpu(length=length, hidden_size=source.config.hidden_size):
        model = build(plan, is_large=case["is_large"])
        found: dict[str, Any] = {"scored": None, "is_applied": None, "seen": []}
        if case["steps"]:
            scored = model.score(share, temperature=1.0)
            step = model.train_step(share, objective, temperature=0.9, with_entropy=head == "policy", with_tokens=True)
            found["scored"] = None if scored is None else {name: list(of.shape) for name, of in scored.items()}
            found["is_applied"] = None if step is None else step.is_applied
            found["computed_tokens"] = None if step is None else step.computed_tokens
            found["seen"] = sorted(objective.seen)
        return found | _tensors_of(model)


def _tensors_of(model: RankModel) -> dict[str, Any]:
    """Devices, dtypes and bytes of a model's tensors, and the pieces that it exports."""
    kept = dict(zip(("weights", "gradients", "optimizer"), model.tensors.kept(), strict=True))
    named = [pair for chunk in model._chunks for pair in chunk.named_parameters()]
    # Megatron's Float16Module and DistributedDataParallel each put "module." before a name.
    float32 = {name.rpartition("module.")[2] for name, one in named if one.dtype == torch.float32}
    return {
        "devices": sorted({one.device.type for tensors in kept.values() for one in tensors}),
        "dtypes": {kind: sorted({str(one.dtype) for one in tensors}) for kind, tensors in kept.items()},
        "float32": sorted(float32),
        "memory": list(model.memory()),
        "pieces": [(one.name, one.shape, one.offsets, one.tensor.shape) for one in model.tensors.export("weights")],
    }


def main() -> None:
    """Answer each case, or say what went wrong."""
    warnings.simplefilter("ignore")
    install_cpu_compatibility(META)
    for line in sys.stdin:
        try:
            found = run_case(json.loads(line))
        except Exception:
            found = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
