"""Whole steps of one rank on the meta device, in a process of their own: a case a line in, what was found a line out."""

import json
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from meta_rank import META, as_on_gpu, become_rank, build

from rl_core.data import Batch, Ragged, RowKey
from rl_core.data.ragged import offsets_of
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.rank_shares import RankShare
from rl_distill.megatron.setup import ModelPlan
from rl_distill.objectives import PolicyObjectiveOptions, policy_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.stepping import open_policy

ROWS = (9, 21, 18)
"""Tokens of the rows of a micro-batch: 48, a multiple of what ranks share them by."""

COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")


def make_batch(num_packs: int) -> Batch:
    """Micro-batches of `ROWS` each."""
    lengths = ROWS * num_packs
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    mask = np.arange(total) - np.repeat(offsets[:-1], lengths) >= 2
    values: dict[str, Any] = {name: np.full(total, -0.5, dtype=np.float32) for name in COLUMNS}
    values["input_ids"] = np.arange(total, dtype=np.int32) % 40
    values["loss_mask"] = mask
    values["loss_weights"] = (mask / mask.sum()).astype(np.float32)
    keys = [RowKey(f"prompt{row}", 0, 0) for row in range(len(lengths))]
    return Batch(keys, {name: Ragged(column, offsets) for name, column in values.items()})


def value_loss(values: torch.Tensor, _entropy: Any, micro: Any) -> Any:
    """A critic's."""
    return (values.square() * micro.columns["loss_weights"]).sum(), {}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Build a rank, score, step twice, export; what devices, dtypes and shapes were seen."""
    parallel = ParallelOptions(**case["layout"])
    source = open_policy(case["policy"], is_critic=case["head"] == "value")
    options = LearnerOptions(**case["options"])
    lora = LoraOptions(rank=case["lora"])
    plan = ModelPlan(source=source, options=options, parallel=parallel, head=case["head"], lora=lora)
    num_packs = 2 * parallel.pipeline
    share = RankShare(batch=make_batch(num_packs), sizes=(len(ROWS),) * num_packs)
    entropy = {} if case["head"] == "value" else {"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    objective = value_loss if case["head"] == "value" else policy_objective(PolicyObjectiveOptions(**entropy))
    length = sum(ROWS) // parallel.context // (parallel.tensor if parallel.sequence else 1)
    become_rank(case["rank"], parallel)
    with as_on_gpu(length=length, hidden_size=source.config.hidden_size):
        model = build(plan)
        scored = model.score(share, temperature=1.0)
        steps = [
            model.train_step(share, objective, temperature=1.0, with_entropy=bool(entropy), with_tokens=True)
            for _ in range(2)
        ]
        return {**found_in(model), "scored": scored is not None, "steps": [one is not None for one in steps]}


def found_in(model: RankModel) -> dict[str, Any]:
    """Devices and dtypes of a model's tensors, and the pieces that it exports."""
    weights, gradients, optimizer = model.tensors.kept()
    kinds = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    float32 = [name for chunk in model._chunks for name, one in chunk.named_parameters() if one.dtype == torch.float32]
    return {
        "devices": sorted({one.device.type for tensors in kinds.values() for one in tensors}),
        "dtypes": {kind: sorted({str(one.dtype) for one in tensors}) for kind, tensors in kinds.items()},
        "float32": sorted({name.rpartition("module.")[2] for name in float32}),
        "pieces": [
            (piece.name, piece.shape, piece.offsets, piece.tensor.shape) for piece in model.tensors.export("weights")
        ],
        "step": model.step,
    }


def main() -> None:
    """Answer each case, or say what went wrong."""
    warnings.simplefilter("ignore")
    install_cpu_compatibility(META)
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            found = run_case(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        found["seconds"] = time.perf_counter() - start
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
