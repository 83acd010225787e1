"""One rank's part of a model in training: gradients of batches, optimizer steps, and adapters in turn."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from rl_core.devices import own_device
from rl_core.errors import DataError
from rl_distill.checkpoints.hf_folder import read_heads
from rl_distill.learner import FIRST_ADAPTER, Objective, OptimStepResult
from rl_distill.megatron.lora import drawing_by, set_options
from rl_distill.megatron.model import OutputRequest, TokenResults
from rl_distill.megatron.overlap import mark_stale
from rl_distill.megatron.rank_batches import Gathered, PlacedPack, RankShare, ShareResult, unknown_experts
from rl_distill.megatron.rank_model import RankModel, total_over_ranks
from rl_distill.megatron.rank_tensors import RankTensors
from rl_distill.megatron.setup import ModelPlan
from rl_distill.objectives.micro_batches import LOSSES, comparison_of, with_columns
from rl_distill.options import AdamOptions, LoraOptions
from rl_distill.packing import Pack
from rl_distill.prefixes import ROUTED_EXPERTS
from rl_distill.stepping import adam_at


class RankTrainer(RankModel):
    """One rank's part of a model with an optimizer."""

    def __init__(self, plan: ModelPlan, *, device: torch.device | None = None) -> None:
        """Build this rank's part; see `RankModel`."""
        super().__init__(plan, device=device)
        self._adapter, self._kept_adapters = FIRST_ADAPTER, dict[str, KeptAdapter]()
        if plan.options.offload_optimizer and self._device.type != "cpu":
            self.keep_optimizer_on_host()

    def train_step(
        self, share: RankShare, /, objective: Objective, **wanted: Any
    ) -> tuple[ShareResult, OptimStepResult] | None:
        """Take one optimizer step; None on ranks that do not report. See `forward_backward` and `optim_step`."""
        result, gathered = self._add_gradients(share, objective, **wanted)
        stepped = self.optim_step()
        if result is None:
            return None
        broken = () if stepped.is_applied else gathered.broken_rows()
        return replace(result, broken_rows=broken), stepped

    def forward_backward(self, share: RankShare, /, objective: Objective, **wanted: Any) -> ShareResult | None:
        """Add a share's gradients to those that wait for `optim_step`; None on ranks that do not report."""
        result, gathered = self._add_gradients(share, objective, **wanted)
        if result is None or np.isfinite(result.loss):
            return result
        return replace(result, broken_rows=gathered.broken_rows())

    def optim_step(self, options: AdamOptions | None = None) -> OptimStepResult:
        """Take one optimizer step with the gradients that wait; see `rl_distill.learner.AccumulatingLearner`."""
        adam, loss = self.tensors.adam, sum(self._losses)
        options = options or adam_at(self.step + 1, self.plan.options)
        if not self._losses:
            adam.zero_grad()
        self._losses = []
        grad_norm = adam.grad_norm() if np.isfinite(loss) else float("nan")
        is_applied = bool(np.isfinite(loss) and np.isfinite(grad_norm))
        if is_applied:
            self.sender.withdraw()
            mark_stale(self._chunks)
            adam.step(grad_norm, options)
            self.step += 1
        return OptimStepResult(
            step=self.step, grad_norm=grad_norm, learning_rate=options.learning_rate, is_applied=is_applied
        )

    def zero_grad(self) -> None:
        """Discard the gradients that wait for `optim_step`."""
        self._losses = []

    def select_adapter(self, /, name: str, *, lora: LoraOptions, **start: Any) -> tuple[int, int]:
        """Set the adapter in training aside and continue another one, which starts now if the name is new.

        Args:
            name: Name of the adapter.
            lora: Options of the adapter, which differ from the others' in `alpha` alone.
            start: Arguments of `RankTensors.start_adapter` for a new adapter.

        Returns:
            The adapter's steps, and the number of its batches whose gradients wait.
        """
        self.sender.withdraw()
        kept = KeptAdapter.of_rank(self.tensors, losses=self._losses, step=self.step)
        self._kept_adapters[self._adapter], self._adapter = kept, name
        if name in self._kept_adapters:
            found = self._kept_adapters.pop(name)
            found.restore(self.tensors)
            self.step, self._losses = found.step, list(found.losses)
        else:
            self.tensors.start_adapter(**start)
            self.step, self._losses = 0, []
        set_options(self._chunks, lora)
        self.tensors.scaling = lora.scaling
        return self.step, len(self._losses)

    def drop_adapter(self, name: str) -> None:
        """Free an adapter that is not in training."""
        del self._kept_adapters[name]

    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Read this rank's vocabulary slices of the teachers' output matrices, in the order of their index."""
        shard = self._shards[-1]
        if shard.has_head:
            self._teacher_heads = read_heads(
                folders,
                self.plan.source.config,
                dtype=self.plan.dtype,
                device=self._device,
                rank=shard.tensor_rank,
                num_ranks=shard.tensor_size,
            )

    def keep_optimizer_on_host(self) -> None:
        """Keep the optimizer's state in host memory between steps from now on."""
        self.tensors.adam.keep_on_host()

    def _add_gradients(
        self,
        share: RankShare,
        objective: Objective,
        *,
        temperature: float,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> tuple[ShareResult | None, Gathered]:
        """Add a share's gradients to those that wait, or leave these unchanged after an error."""
        gathered = Gathered()

        def evaluate(index: int, placed: PlacedPack, scores: TokenResults) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # noqa: ARG001
            values = placed.spread(scores.values)
            entropy = None
            if (with_entropy or with_tokens) and scores.entropy is not None:
                entropy = placed.spread(scores.entropy)
            measured = {name: placed.spread(of) for name, of in scores.others.items()}
            if len(placed.pack.rows):
                micro_batch = with_columns(placed.pack.micro_batch, measured)
                loss, sums = objective(values, entropy if with_entropy else None, micro_batch)
                if not loss.requires_grad:
                    raise DataError("the objective's loss has no gradient. Do not detach the logprobs.")
                scored = {"policy_logprobs": values} | ({} if entropy is None else {"entropy": entropy})
                gathered.add(placed.pack, values + measured.get(LOSSES, 0.0), loss, sums, scored=scored)
            else:
                loss = scores.trained * 0.0
            return loss, torch.zeros((), dtype=torch.int), {}

        mask = "loss_mask" if "loss_mask" in share.batch else None
        comparison = comparison_of(objective)
        wanted = OutputRequest(temperature=temperature, comparison=comparison, heads=self._teacher_heads)
        packs = self._packs(share)
        with self.tensors.adam.adding(has_gradients=bool(self._losses)):
            with self._dropping():
                self._run(packs, evaluate, wanted=wanted, mask=mask, with_gradients=True)
            own_loss, metrics = gathered.totals()
            loss = total_over_ranks(own_loss if self.place.answers else 0.0)
            routing = self._routing(packs) if ROUTED_EXPERTS in share.batch else {}
            result = ShareResult(
                loss=loss,
                metrics=metrics | routing,
                tokens=gathered.tokens(share.batch) if with_tokens and self.place.answers else {},
                computed_tokens=sum(pack.forest.num_computed for pack in packs),
            )
        self._losses.append(loss)
        return (result if self.place.answers else None), gathered

    def _routing(self, packs: Sequence[Pack]) -> dict[str, tuple[float, float]]:
        """Return the routing metrics of replayed experts as (weighted sum, weight); every rank calls it together.

        The routers count rows over all ranks, and the first share reports those counts. Each share reports its own
        tokens.
        """
        replayed, rerouted = (total_over_ranks(float(count)) for count in self._routed)
        mixture = self.plan.source.config.mixture
        totals = {"router/unknown_share": unknown_experts(packs, mixture.layers if mixture is not None else ())}
        return totals if self.place.data else {"router/rerouted_share": (rerouted, replayed), **totals}

    def _dropping(self) -> AbstractContextManager[None]:
        """Return the adapter's dropout context, seeded by the step so that a repeated step drops the same units.

        Each batch of a step drops other units.
        """
        if not self.plan.lora.dropout:
            return nullcontext()
        groups = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        later_batch = (len(self._losses),) if self._losses else ()
        return drawing_by((self.plan.options.seed, self.step, *groups, *later_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """An adapter's state on one rank, in host memory.

    Attributes:
        tensors: Copies of `RankTensors.adapter_state`.
        gradients: Copies of the gradients that wait for an optimizer step; empty if none wait.
        losses: Losses of the batches whose gradients wait.
        step: Optimizer steps done so far.
    """

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor]
    losses: Sequence[float]
    step: int

    @classmethod
    def of_rank(cls, tensors: RankTensors, *, losses: Sequence[float], step: int) -> "KeptAdapter":
        """Copy the adapter in training."""
        with tensors.adam.on_device():
            kept = cls(
                tensors=[_on_host(tensor) for tensor in tensors.adapter_state()],
                gradients=[_on_host(gradient) for gradient in tensors.adam.gradients()] if losses else [],
                losses=tuple(losses),
                step=step,
            )
        if own_device().type != "cpu":
            torch.accelerator.synchronize()  # the copies are complete before the host may read them
        return kept

    @torch.no_grad()
    def restore(self, tensors: RankTensors) -> None:
        """Continue this adapter in place of the one in training."""
        with tensors.adam.on_device():
            for live, kept in zip(tensors.adapter_state(), self.tensors, strict=True):
                live.copy_(kept, non_blocking=True)
            tensors.adam.set_step(self.step)
        if self.gradients:
            for live, kept in zip(tensors.adam.gradients(), self.gradients, strict=True):
                live.copy_(kept, non_blocking=True)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", non_blocking=True, copy=True)
