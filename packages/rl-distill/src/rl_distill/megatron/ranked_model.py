"""Models over a learner's ranks: what policies, critics, references and teachers have in common."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.data import Batch, Ragged, token_positions
from rl_core.errors import CheckpointError
from rl_core.record_fields import converts_arguments
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SenderOptions, join_offers
from rl_distill.architecture.lora_targets import adapted_modules
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.adapter_checkpoint import TrainedAdapter
from rl_distill.checkpoints.checkpoint import (
    STATE_FOLDER,
    finish_checkpoint,
    read_header,
    require_empty,
    state_shapes,
)
from rl_distill.checkpoints.torch_dist import Piece, TensorFolder
from rl_distill.learner import LearnerOptions, Objective, PendingSave, StepResult
from rl_distill.megatron.model import Head
from rl_distill.megatron.rank_shares import RankShare, StepShare
from rl_distill.megatron.rank_tensors import Exported
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.megatron.setup import ModelPlan
from rl_distill.metric_sums import metric_values
from rl_distill.options import LoraOptions, ParallelOptions
from rl_distill.packing import Rows, plan_batch
from rl_distill.parallel_layout import check_layout, check_learner
from rl_distill.prefixes import ROUTED_EXPERTS
from rl_distill.products import chosen_products
from rl_distill.stepping import check_open, check_temperature, check_trainable, open_policy
from rl_distill.token_checks import check_tokens


class RankedModel:
    """A model over a learner's ranks: what policies, critics and references have in common.

    Attributes:
        kind: Its name on the ranks, unless another is given.
        head: What comes out.
        trains: False keeps neither gradients nor an optimizer.
        replays: True takes the experts of the column `routed_experts`, which the policy's engine used; the routers of
            other models choose by themselves.
        step: Optimizer steps done so far.
    """

    kind: ClassVar[str]
    head: ClassVar[Head] = "policy"
    trains: ClassVar[bool] = True
    replays: ClassVar[bool] = False
    _lora = LoraOptions()

    def __init__(
        self,
        policy: Path | str | Mapping[str, Any],
        options: LearnerOptions,
        *,
        ranks: LearnerRanks | None = None,
        name: str | None = None,
    ) -> None:
        """Build the model on every rank.

        Args:
            policy: A Hugging Face folder with safetensors, or a config.json's content for random weights.
            options: How to train.
            ranks: Where; None for this process alone.
            name: Of the model on its ranks; None for what it is.

        Raises:
            SettingsError: The architecture, a setting or the layout is not supported.
            DataError: A file or tensor of the folder is missing or torn.
            MissingExtraError: megatron-core is not installed.
        """
        options.check()
        self._lora.check()
        self._source = open_policy(policy, is_critic=self.head == "value")
        parallel = ParallelOptions() if ranks is None else ranks.parallel
        check_layout(parallel, self._source.config)
        if self.trains:
            check_learner(options, parallel, self._source.config, lora=self._lora)
        adapted_modules(self._source.config, self._lora)
        self._name = name or self.kind
        self._owns_ranks = ranks is None
        self._ranks = ranks or LearnerRanks(parallel, num_threads=options.num_threads)
        products = "torch" if self._ranks.places[0].has_gpu else chosen_products(options.products)
        self._options = options = replace(options, products=products)
        plan = ModelPlan(
            source=self._source,
            options=options,
            parallel=parallel,
            head=self.head,
            trains=self.trains,
            lora=self._lora,
        )
        built: list[tuple[int, bool]] = self._ranks.call_all("build", self._name, plan)
        self._num_parameters = sum(num_parameters for num_parameters, _ in built)
        self._min_shared = options.shared_prefix_tokens if all(shares for _, shares in built) else 0
        self.step = 0
        self._is_open = True

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        check_open(self._is_open)
        return self._num_parameters

    @property
    def tied(self) -> Mapping[str, str]:
        """Names served from another tensor."""
        return self._source.config.tied

    def offload(self) -> int:
        """Free what the model needs only while it works; its next call brings it back. Gives the bytes freed.

        On GPUs parameters, gradients and the optimizer's state go to the host's memory. On CPUs there is no other
        memory, so only the gradients are freed.
        """
        check_open(self._is_open)
        return sum(self._ranks.call_all("offload", self._name))

    def close(self) -> None:
        """Free the model; ranks that were given stay. Can be called twice."""
        if self._is_open:
            self._is_open = False
            if self._owns_ranks:
                self._ranks.close()
            elif self._ranks.is_alive:
                self._ranks.call_all("drop", self._name)

    def _score(self, batch: Batch, *, temperature: float = 1.0, is_base: bool = False) -> Ragged:
        """A float32 for each token, in the batch's row order."""
        check_open(self._is_open)
        check_temperature(temperature)
        ids = batch.ragged("input_ids")
        shares, rows = self._shares(batch.only({"input_ids", ROUTED_EXPERTS} & batch.names))
        found = self._call_shares("score", shares, temperature=temperature, is_base=is_base)
        tokens = _in_batch_order(batch, rows, found)
        return tokens.get("values", Ragged(np.zeros(len(ids.values), dtype=np.float32), ids.offsets))

    def _train(self, batch: Batch, objective: Objective, *, temperature: float = 1.0, **wanted: bool) -> StepResult:
        check_open(self._is_open)
        check_temperature(temperature)
        check_trainable(batch)
        shares, rows = self._shares(batch)
        parts: list[StepShare] = self._call_shares("train_step", shares, objective, temperature=temperature, **wanted)
        broken = [int(of_rank[row]) for of_rank, part in zip(rows, parts, strict=True) for row in part.broken_rows]
        first = parts[0]
        self.step += first.is_applied
        return StepResult(
            step=self.step,
            loss=first.loss,
            grad_norm=first.grad_norm,
            learning_rate=first.learning_rate,
            metrics=metric_values(part.metrics for part in parts),
            is_applied=first.is_applied,
            broken_rows=tuple(sorted(broken)),
            tokens=_in_batch_order(batch, rows, [part.tokens for part in parts]),
            computed_tokens=sum(part.computed_tokens for part in parts),
        )

    def _shares(self, batch: Batch) -> tuple[list[RankShare], list[Rows]]:
        """Each data-parallel rank's rows in the order of its micro-batches, and which rows these are."""
        if not self.replays:
            batch = batch.only(batch.names - {ROUTED_EXPERTS})
        check_tokens(batch, self._source.config)
        parallel = self._ranks.parallel
        plans = plan_batch(
            batch,
            max_tokens=self._options.micro_batch_tokens * parallel.context,
            num_ranks=parallel.data,
            multiple_of=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
            min_shared=self._min_shared,
        )
        rows = [np.concatenate([*plan, np.zeros(0, dtype=np.int64)]) for plan in plans]
        shares = [
            RankShare(batch=batch.select(of_rank), sizes=tuple(map(len, plan)), min_shared=self._min_shared)
            for of_rank, plan in zip(rows, plans, strict=True)
        ]
        return shares, rows

    def _call_shares(self, method: str, shares: Sequence[RankShare], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the model with each rank's share; gives the answers in the order of the shares."""
        calls = [(self._name, method, (shares[place.data], *args), kwargs) for place in self._ranks.places]
        answers = self._ranks.call_each("run", calls)
        pairs = zip(self._ranks.places, answers, strict=True)
        by_share = {place.data: answer for place, answer in pairs if place.answers}
        return [by_share[number] for number in range(len(shares))]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model by Hugging Face name."""
        return tensor_shapes(self._source.config)


def _in_batch_order(
    batch: Batch, rows: Sequence[Rows], found: Sequence[Mapping[str, NDArray[np.float32]]]
) -> dict[str, Ragged]:
    """Values of tokens by name, float32, from what each data-parallel rank gave for its rows; {} of none."""
    ids = batch.ragged("input_ids")
    out = {name: np.zeros(len(ids.values), dtype=np.float32) for of_rank in found for name in of_rank}
    for of_rank, named in zip(rows, found, strict=True):
        for name, values in named.items():
            out[name][token_positions(ids.offsets[of_rank], ids.lengths[of_rank])] = values
    return {name: Ragged(values, ids.offsets) for name, values in out.items()}


class TrainedModel(RankedModel):
    """A model with an optimizer: its weights leave it, and it is saved and loaded."""

    def export_weights(self) -> Mapping[str, Tensor]:
        """All weights by Hugging Face name: views where this process has them, on their device, until the next step.

        Those of ranks in other processes are copies on the CPU.
        """
        return self._export("weights", self._shapes())

    def offer_weights(self, options: SenderOptions, *, version: int) -> WeightUpdate:
        """Have every rank send what it holds to engines that ask, until the weights change.

        Args:
            options: How; a rank on a GPU sends by NCCL, and all share the bytes of a bucket.
            version: What they are called.

        Raises:
            WeightProofError: What the ranks hold does not make up a tensor; the message names it.
        """
        check_open(self._is_open)
        offers = self._ranks.call_all("offer", self._name, options, version=version)
        return join_offers(offers, self._shapes(), version=version, tied=self.tied)

    def expect_engines(self, num_receivers: int) -> None:
        """Change how many engines the ranks expect; for any thread."""
        check_open(self._is_open)
        self._ranks.expect_engines(self._name, num_receivers)

    def _export(self, what: Exported, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors in the order of their names, from what the ranks have of them."""
        check_open(self._is_open)
        found: list[list[Piece]] = self._ranks.call_all("export", self._name, what, on_host=not self._ranks.is_inline)
        pieces = [piece for of_rank in found for piece in of_rank]
        weights: dict[str, Tensor] = {}
        for piece in pieces:
            sizes = piece.tensor.shape
            if sizes == piece.shape:
                weights[piece.name] = piece.tensor
                continue
            if piece.name not in weights:
                weights[piece.name] = torch.empty(piece.shape, dtype=piece.tensor.dtype, device=piece.tensor.device)
            place = tuple(slice(o, o + s) for o, s in zip(piece.offsets, sizes, strict=True))
            weights[piece.name][place] = piece.tensor
        return {name: weights[name] for name in names}

    @converts_arguments
    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Write a checkpoint into an empty directory: see `rl_distill.learner.Learner`."""
        check_open(self._is_open)
        require_empty(directory)
        self._ranks.call_all("begin_save", self._name, directory / STATE_FOLDER)
        pending = PendingSave(partial(self._finish_save, directory, step=self.step, adapter=self._trained_adapter()))
        if not in_background:
            pending.wait()
        return pending

    @converts_arguments
    def load(self, directory: Path) -> None:
        """Continue from `save`, under whatever layout it was written.

        Raises:
            CheckpointError: Missing, torn, or of another model; the learner is unchanged.
        """
        check_open(self._is_open)
        adapter = self._trained_adapter()
        step = read_header(directory, config=self._source.config, dtype=self._options.dtype, adapter=adapter)
        TensorFolder(directory / STATE_FOLDER).check(state_shapes(self._saved_shapes()))
        problems = self._ranks.call_all("read_state", self._name, directory / STATE_FOLDER)
        if any(problems):
            self._ranks.call_all("forget_state", self._name)
            raise CheckpointError(next(problem for problem in problems if problem))
        self._ranks.call_all("apply_state", self._name, step=step)
        self.step = step

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor whose float32 values a checkpoint has: an adapter's, or all weights."""
        return self._shapes()

    def _trained_adapter(self) -> TrainedAdapter | None:
        """The adapter that trains in the place of the weights; None where these train."""
        return None

    def _finish_save(self, directory: Path, *, step: int, adapter: TrainedAdapter | None) -> None:
        """Wait for the ranks, and write what names their files; the header last."""
        written, names = self._ranks.finish_save(directory / STATE_FOLDER), list(self._saved_shapes())
        source, options = self._source, self._options
        finish_checkpoint(directory, written, source=source, names=names, options=options, step=step, adapter=adapter)
