"""One rank's part of a model, which processes the rank's share of a batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.data import Batch
from rl_core.devices import own_device
from rl_core.errors import SettingsError
from rl_core.weights.broadcast import RankOffer, SenderOptions, WeightSender, offer_from_rank
from rl_distill.architecture.memory import RankMemory
from rl_distill.megatron.any_model.chunk import TransformersModel
from rl_distill.megatron.any_model.images import RankImages, load_images
from rl_distill.megatron.any_model.sharded import ShardedAdam, drop_gathered
from rl_distill.megatron.attention.layout import rotary_frequencies
from rl_distill.megatron.lora import base_alone
from rl_distill.megatron.model import OutputRequest, TokenResults, TokenScoring
from rl_distill.megatron.optimizer import MegatronAdam, Offloaded, RankAdam
from rl_distill.megatron.overlap import gather_weights
from rl_distill.megatron.parallel import RankPosition, shards_of_this_rank
from rl_distill.megatron.rank_batches import (
    PlacedPack,
    RankShare,
    Sharing,
    on_device,
    padded_length,
    place_pack,
)
from rl_distill.megatron.rank_tensors import RankTensors, States
from rl_distill.megatron.setup import ModelPlan, build_chunks
from rl_distill.packing import Pack, pack_rows, scored_tokens
from rl_distill.products import chosen_products, computing_with

Weights = Literal["policy", "reference", "average"]
"""Weights to score with: a model's own, those without its adapter, or the moving average of those in training."""


class RankModel:
    """One rank's part of a model. Every rank calls the same methods together.

    Attributes:
        plan: The model that was built.
        place: This rank's position in the parallel layout.
        step: Optimizer steps done so far.
        tensors: Weights, gradients and optimizer state of the rank.
        shares_prefixes: True if attention computes shared prefixes of rows once.
    """

    def __init__(self, plan: ModelPlan, *, device: torch.device | None = None) -> None:
        """Build this rank's part.

        Args:
            plan: The model to build.
            device: Device of the model; None for this process's GPU, or the CPU if there is none.

        Raises:
            DataError: A file or tensor of the policy's folder is missing or incomplete.
            SettingsError: The requested matrix products or kernels are not available here.
        """
        self.plan = plan
        chosen_products(plan.options.products)
        self.place = RankPosition.of_this_rank()
        self.step = 0
        self._losses: list[float] = []
        self._teacher_heads: list[Tensor] = []
        self._device = device or own_device()
        self._shards = shards_of_this_rank(plan.source.config, plan.parallel)
        self._chunks = build_chunks(plan, self._shards, device=self._device)
        self._offloaded: Offloaded | None = None
        has_flash = self._chunks[0].config.kernels.attention == "varlen"
        self.shares_prefixes = has_flash or self._device.type == "cpu"
        self._sharing = _sharing(plan, has_flash=has_flash)
        self._images: RankImages | None = None
        if plan.source.config.image_token_id is not None:
            options = plan.options
            self._images = load_images(plan.source.policy_dir, options.image_folder, dtype=plan.dtype)
        for model in self._own_models():
            model.settle(self._place, self._images)
            self.shares_prefixes &= model.shares_prefixes
        drop_gathered(self._chunks)
        self._routed = [0, 0]
        adam = _optimizer(plan, self._chunks) if plan.trains else None
        if adam is not None and plan.average_decay:
            adam.keep_average(plan.average_decay)
        self.tensors = RankTensors(plan, self._chunks, self._shards, adam)
        if adam is not None and plan.options.algorithm == "muon":
            adam.use_muon(self.tensors.hidden_matrices())
        self.sender = WeightSender(f"rank {dist.get_rank()} of the learner")
        for chunk in self._chunks:
            chunk.config.finalize_model_grads_func = None if plan.parallel.shard_weights else _finalize_without_division
            chunk.config.grad_scale_func = None
            # Megatron's interleaved schedule confuses the lengths that stages send forward and backward. With several
            # chunks no lengths are sent, and every micro-batch of a step is padded to the longest.
            chunk.config.variable_seq_lengths = len(self._chunks) == 1

    def score(
        self,
        share: RankShare,
        *,
        temperature: float,
        top_k: int | None = None,
        has_hidden: bool = False,
        weights: Weights = "policy",
    ) -> dict[str, NDArray[Any]] | None:
        """Return logprobs of the share's tokens, or a critic's values, in its order; None on ranks that do not report.

        Args:
            share: The rank's rows of the batch.
            temperature: Divisor of the logits.
            top_k: Also return the logprobs and ids of the K most probable tokens, as "logprobs" and "ids" [T, K + 1]
                with the token itself first.
            has_hidden: Also return the last hidden states, "hidden" [T, H]; a model in training keeps the output matrix
                that belongs to them as its teacher's.
            weights: Weights to compute with.
        """
        packs = self._packs(share)

        def evaluate(index: int, placed: PlacedPack, scores: TokenResults) -> tuple[int, dict[str, Tensor]]:
            named = {"values": scores.values.float(), **scores.others}
            # Copies to pinned memory while the GPU computes the next pack.
            return index, {name: placed.spread(of).to("cpu", non_blocking=True) for name, of in named.items()}

        wanted = OutputRequest(temperature=temperature, top_k=top_k, has_hidden=has_hidden)
        with self._using(weights):
            results = self._run(packs, evaluate, wanted=wanted, mask=None, with_gradients=False)
            if has_hidden and self.plan.trains:
                self._teacher_heads = self._own_head()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if not self.place.answers:
            return None
        parts = [named for _, named in sorted(results, key=lambda pair: pair[0])]
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in (parts[0] if parts else ())}

    def _using(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context that computes with these weights."""
        if weights == "average":
            self.sender.withdraw()  # engines must not fetch the average
            return self.tensors.averaged()
        return base_alone(self._chunks) if weights == "reference" else nullcontext()

    def _own_head(self) -> list[Tensor]:
        """Return a copy of this rank's slice of the output matrix; none on a stage without it."""
        modules = self._chunks[-1].modules() if self._shards[-1].has_head else ()
        heads = [module._with_head(torch.clone).detach() for module in modules if isinstance(module, TokenScoring)]
        return [(head.full_tensor() if isinstance(head, DTensor) else head).to(self.plan.dtype) for head in heads]

    def _own_models(self) -> list[TransformersModel]:
        """Return the chunks that transformers computes."""
        modules = (module for chunk in self._chunks for module in chunk.modules())
        return [module for module in modules if isinstance(module, TransformersModel)]

    def _place(self, batch: Batch, min_shared: int) -> PlacedPack:
        """Lay out a batch as one pack, with all tokens scored."""
        pack = pack_rows(batch, np.arange(len(batch)), device=torch.device("cpu"), min_shared=min_shared)
        return self._placed(pack, scored_tokens(pack, mask=None), length=padded_length(pack, self._sharing))

    def _placed(self, pack: Pack, scored: Tensor, *, length: int, each_row: bool = False) -> PlacedPack:
        """Lay out a pack on the model's device, with its images."""
        placed = place_pack(pack, scored, self._sharing, length=length, each_row=each_row)
        if self._images is not None:
            (model,) = self._own_models()
            placed = replace(placed, images=self._images.of_pack(pack, model.positions_of))
        return on_device(placed, self._device)

    def _packs(self, share: RankShare) -> list[Pack]:
        """Return the micro-batches of a share, whose images are then at hand."""
        if self._images is not None:
            self._images.hold(share.batch)
        elif any(share.batch.images):
            raise SettingsError(
                f"rows have images, but {self.plan.source.policy_dir} has no processor that transformers can load."
            )
        return share.packs()

    def offload(self) -> int:
        """Free memory until the next call, which restores everything; return the bytes freed.

        On a GPU, parameters, gradients and optimizer state move to host memory. On a CPU only the gradients are freed.
        Gradients that wait for `optim_step` are kept.
        """
        if self._offloaded is None:
            self.sender.withdraw()
            gather_weights(self._chunks)
            weights, gradients, optimizer = self.tensors.kept()
            kept, dropped = ([*gradients], []) if self._losses else ([], gradients)
            self._offloaded = Offloaded([] if self._device.type == "cpu" else [*weights, *optimizer, *kept], dropped)
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        return self._offloaded.num_bytes

    def reload(self) -> None:
        """Restore what `offload` freed."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def offer(self, options: SenderOptions, *, version: int) -> RankOffer:
        """Let engines fetch this rank's weights until they change; see `offer_from_rank`."""
        return offer_from_rank(self.sender, self.tensors.held(), options, version=version)

    def memory(self) -> RankMemory:
        """Return the bytes that the model keeps on this rank between calls, which `rank_memory` predicts."""
        return RankMemory(*(sum(tensor.nbytes for tensor in tensors) for tensors in self.tensors.kept()))

    def load_state(self, states: States, *, step: int) -> None:
        """Continue from the state loaded into `RankTensors.empty_state`."""
        self.sender.withdraw()
        self.tensors.load_state(states, step=step)
        self.step = step

    def close(self) -> None:
        """Free the model."""
        self.sender.close()
        self._chunks = []
        del self.tensors

    def _run(
        self,
        packs: list[Pack],
        evaluate: Callable[[int, PlacedPack, TokenResults], Any],
        *,
        wanted: OutputRequest,
        mask: str | None,
        with_gradients: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over the packs and call `evaluate` with the scores of each pack on the last stage.

        Returns:
            The results of `evaluate` without gradients; with gradients, the list is not meaningful.
        """
        placed: dict[int, PlacedPack] = {}
        is_virtual = len(self._chunks) > 1
        lengths = [padded_length(pack, self._sharing) for pack in packs]
        longest = max(lengths, default=1)

        def place(index: int) -> PlacedPack:
            if index not in placed:
                pack, length = packs[index], longest if is_virtual else lengths[index]
                scored, each_row = scored_tokens(pack, mask=mask), wanted.comparison is not None
                placed[index] = self._placed(pack, scored, length=length, each_row=each_row)
            return placed[index]

        def forward_step(source: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
            index = next(source)
            output = model(place(index), wanted=wanted)
            return output, lambda scores, **_: evaluate(index, placed[index], scores.within_nucleus(placed[index]))

        sources = [iter(range(len(packs))) for _ in self._chunks]
        for chunk in self._chunks:
            chunk.train(with_gradients)
        with computing_with(self.plan.options.products), nullcontext() if with_gradients else torch.no_grad():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=sources if is_virtual else sources[0],
                model=self._chunks if is_virtual else self._chunks[0],
                num_microbatches=len(packs),
                seq_length=longest,
                micro_batch_size=1,
                forward_only=not with_gradients,
                collect_non_loss_data=not with_gradients,
            )
        drop_gathered(self._chunks)
        routed = [one.layout.routed.sum(0) for one in placed.values() if one.layout.routed is not None]
        self._routed = torch.stack(routed).sum(0).tolist() if routed else [0, 0]
        return results


def _optimizer(plan: ModelPlan, chunks: Sequence[Any]) -> RankAdam:
    if plan.parallel.shard_weights:
        return ShardedAdam(chunks)
    return MegatronAdam(chunks, plan.options, is_distributed=plan.parallel.distributed_optimizer)


def _sharing(plan: ModelPlan, *, has_flash: bool) -> Sharing:
    config, parallel = plan.source.config, plan.parallel
    heads, groups = config.num_heads // parallel.tensor, config.num_key_value_heads // parallel.tensor
    has_context = parallel.context > 1
    head_counts = None if has_flash else (heads // parallel.context, max(1, groups // parallel.context))
    return Sharing(
        context_group=parallel_state.get_context_parallel_group() if has_context else None,
        context_rank=parallel_state.get_context_parallel_rank() if has_context else 0,
        context_size=parallel.context,
        sequence_size=parallel.tensor if parallel.sequence else 1,
        head_counts=(1,) if config.model_json else head_counts,
        frequencies=rotary_frequencies(config),
        has_blocks=has_flash,
    )


def total_over_ranks(value: float) -> float:
    """Return the sum of a number over all ranks; NaN and infinity propagate to every rank."""
    if dist.get_world_size() == 1:
        return value  # the process group of an engine in this process may not support CPU tensors
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _finalize_without_division(model: list[Any], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks without dividing, because `loss_weights` already normalizes over the global batch."""
    finalize_model_grads(model, None, **kwargs)
