"""Models distributed over a learner's ranks: the base of policies, critics, references and teachers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.data import Batch, Ragged, token_positions
from rl_core.errors import CheckpointError, NotReadyError, SettingsError
from rl_core.record_fields import converts_arguments
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SenderOptions, join_offers
from rl_distill.architecture.lora_targets import adapted_modules, adapter_shapes
from rl_distill.architecture.policy_config import ModelBackend
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.checkpoint import (
    STATE_FOLDER,
    TrainedAdapter,
    fingerprint_tensors,
    finish_checkpoint,
    read_header,
    require_empty,
    state_shapes,
)
from rl_distill.checkpoints.pieces import TensorFolder
from rl_distill.learner import (
    ForwardBackwardResult,
    LearnerOptions,
    Objective,
    PendingSave,
    StepResult,
    metric_values,
)
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.model import Head
from rl_distill.megatron.rank_batches import RankShare, ShareResult
from rl_distill.megatron.rank_model import RankModel, Weights
from rl_distill.megatron.rank_tensors import Exported
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.megatron.setup import ModelPlan
from rl_distill.options import LoraOptions, ParallelOptions
from rl_distill.packing import Rows, plan_batch
from rl_distill.parallel_layout import check_layout, check_learner
from rl_distill.prefixes import NUCLEUS, ROUTED_EXPERTS
from rl_distill.products import chosen_products
from rl_distill.stepping import check_open, check_temperature, check_tokens, check_trainable, open_policy

Options = ParamSpec("Options")
Answer = TypeVar("Answer")


class RankedModel:
    """A model distributed over a learner's ranks: the base of policies, critics, references and teachers.

    Attributes:
        kind: Default name of the model on the ranks.
        head: Output of the model: token scores or values.
        trains: True if the model has gradients and an optimizer.
        replays: True to route tokens to the experts in the column `routed_experts`, which the rollout engine used;
            otherwise the routers choose.
        num_parameters: Number of parameters; a tied head counts once.
        step: Optimizer steps done so far.
    """

    kind: ClassVar[str]
    head: ClassVar[Head] = "policy"
    trains: ClassVar[bool] = True
    replays: ClassVar[bool] = False
    _lora = LoraOptions()
    _average_decay = 0.0

    def __init__(
        self,
        policy: Path | str | Mapping[str, Any],
        options: LearnerOptions,
        *,
        ranks: LearnerRanks | None = None,
        name: str | None = None,
        backend: ModelBackend = "auto",
    ) -> None:
        """Build the model on every rank.

        Args:
            policy: Hugging Face folder with safetensors, or the content of a config.json for random weights.
            options: Learner options.
            ranks: Ranks that hold the model; None to use this process alone.
            name: Name of the model on its ranks; None uses `kind`.
            backend: What computes the model: our layers, or transformers' class; see `parse_policy_config`.

        Raises:
            SettingsError: The architecture, a setting or the layout is not supported.
            DataError: A file or tensor of the folder is missing or incomplete.
            MissingExtraError: megatron-core is not installed.
        """
        options.check()
        lora = self._lora
        self._source = open_policy(
            policy, is_critic=self.head == "value", backend=backend, trains_vision=options.trains_vision and self.trains
        )
        parallel = ParallelOptions() if ranks is None else ranks.parallel
        check_layout(parallel, self._source.config, lora=lora)
        if self.trains:
            check_learner(options, parallel, self._source.config, lora=lora)
        adapted_modules(self._source.config, lora)
        self._name = name or self.kind
        self._owns_ranks = ranks is None
        self._open_ranks: LearnerRanks | None = ranks or LearnerRanks(parallel, num_threads=options.num_threads)
        products = "torch" if self._ranks.places[0].has_gpu else chosen_products(options.products)
        self._options = options = replace(options, products=products)
        source, head = self._source, self.head
        plan = ModelPlan(source=source, options=options, parallel=parallel, head=head, trains=self.trains, lora=lora)
        plan = replace(plan, average_decay=self._average_decay)
        built = self._ranks.call_all(RankHost.build, self._name, plan)
        self._min_shared = options.shared_prefix_tokens if all(shares for _, shares in built) else 0
        self.num_parameters = sum(num_parameters for num_parameters, _ in built)
        self.step = 0

    @property
    def _ranks(self) -> LearnerRanks:
        """Ranks of the model, unless it was closed."""
        return check_open(self._open_ranks)

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of tied tensors, each mapped to the tensor whose values it shares."""
        return self._source.config.tied

    def offload(self) -> int:
        """Free memory until the next call, which restores everything; return the bytes freed over all ranks.

        On GPUs, parameters, gradients and optimizer state move to host memory. On CPUs only the gradients are freed.
        """
        return sum(self._ranks.call_all(RankHost.offload, self._name))

    def close(self) -> None:
        """Free the model, and the ranks if this model created them. Can be called twice."""
        ranks, self._open_ranks = self._open_ranks, None
        if ranks is not None and self._owns_ranks:
            ranks.close()
        elif ranks is not None and ranks.is_alive:
            ranks.call_all(RankHost.drop, self._name)

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return float32 logprobs of all tokens in the batch's row order; 0 at the first token of each trajectory."""
        return self._score(batch, temperature=temperature)

    def _score(self, batch: Batch, *, temperature: float = 1.0, weights: Weights = "policy") -> Ragged:
        """Compute one float32 per token, or per id in `target_ids`, in the batch's row order; see `Scorer`."""
        check_temperature(temperature)
        ids = batch.ragged("input_ids")
        shares, rows = self._shares(batch.only({"input_ids", "target_ids", NUCLEUS, ROUTED_EXPERTS} & batch.names))
        scores = self._call_shares(RankModel.score, shares, temperature=temperature, weights=weights)
        tokens = in_batch_order(batch, rows, scores)
        return tokens.get("values", Ragged(np.zeros(len(ids.values), dtype=np.float32), ids.offsets))

    def score(
        self,
        batch: Batch,
        *,
        top_k: int,
        temperature: float = 1.0,
        has_hidden: bool = False,
        weights: Weights = "policy",
    ) -> tuple[Ragged, Ragged, Ragged | None]:
        """Score each token given the tokens before it, as a teacher.

        Args:
            batch: Batch with `input_ids`.
            top_k: Number of most probable tokens to return.
            temperature: Divisor of the logits.
            has_hidden: True to return the hidden states. A model in training keeps the output matrix that belongs to
                them, in place of `load_teacher_heads`.
            weights: Weights of a model in training: its own, those without its adapter, or the average that it keeps.

        Returns:
            float32 logprobs and int32 ids [K + 1] per token, with the token itself first and then the most probable
            ones; 0 and -1 at the first token of each trajectory. float32 hidden states [H] that predict each token, or
            None.

        Raises:
            SettingsError: top_k exceeds the vocabulary, or the temperature is out of range.
            ShapeError: A token is outside the vocabulary, or a trajectory is too long.
        """
        check_temperature(temperature)
        most = self._source.config.vocab_size
        if not 0 <= top_k <= most:
            raise SettingsError(f"top_k must be from 0 to {most}, the size of the teacher's vocabulary; found {top_k}.")
        shares, rows = self._shares(batch.only({"input_ids"}))
        scores = self._call_shares(
            RankModel.score, shares, temperature=temperature, top_k=top_k, has_hidden=has_hidden, weights=weights
        )
        columns = in_batch_order(batch, rows, scores)
        logprobs, ids = columns["logprobs"], columns["ids"].values.astype(np.int32)
        ids[logprobs.offsets[:-1]] = -1
        return logprobs, Ragged(ids, logprobs.offsets), columns.get("hidden")

    def _shares(self, batch: Batch) -> tuple[list[RankShare], list[Rows]]:
        """Return each data-parallel rank's share of the batch in micro-batch order, and the row indices of each."""
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

    def _call_all(
        self, method: Callable[Concatenate[RankTrainer, Options], Answer], *args: Options.args, **kwargs: Options.kwargs
    ) -> list[Answer]:
        """Call a method of the model on every rank."""
        return self._ranks.call_all(RankHost.run, self._name, method.__name__, args, kwargs)

    def _call_shares(
        self,
        method: Callable[Concatenate[RankTrainer, RankShare, Options], Answer | None],
        shares: Sequence[RankShare],
        *args: Options.args,
        **kwargs: Options.kwargs,
    ) -> list[Answer]:
        """Call a method of the model on every rank with its share; return the results in the order of the shares."""
        calls = [(self._name, method.__name__, (shares[place.data], *args), kwargs) for place in self._ranks.places]
        answers: list[Answer] = self._ranks.call_each(RankHost.run, calls)
        pairs = zip(self._ranks.places, answers, strict=True)
        by_share = {place.data: answer for place, answer in pairs if place.answers}
        return [by_share[number] for number in range(len(shares))]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the model by Hugging Face name."""
        return tensor_shapes(self._source.config)


def in_batch_order(
    batch: Batch, rows: Sequence[Rows], shares: Sequence[Mapping[str, NDArray[Any]]]
) -> dict[str, Ragged]:
    """Merge the shares' token values into the batch's row order, by name; empty if there are none."""
    ids = batch.ragged("input_ids")
    out: dict[str, NDArray[Any]] = {}
    for of_rank, named in zip(rows, shares, strict=True):
        places = token_positions(ids.offsets[of_rank], ids.lengths[of_rank])
        for name, values in named.items():
            if name not in out:
                out[name] = np.zeros((len(ids.values), *values.shape[1:]), dtype=values.dtype)
            out[name][places] = values
    return {name: Ragged(values, ids.offsets) for name, values in out.items()}


def joined(batch: Batch, rows: Sequence[Rows], shares: Sequence[ShareResult]) -> ForwardBackwardResult:
    """Merge the shares' results of a pass over a batch."""
    broken = [int(of_rank[row]) for of_rank, share in zip(rows, shares, strict=True) for row in share.broken_rows]
    return ForwardBackwardResult(
        loss=shares[0].loss,
        metrics=metric_values(share.metrics for share in shares),
        broken_rows=tuple(sorted(broken)),
        tokens=in_batch_order(batch, rows, [share.tokens for share in shares]),
        computed_tokens=sum(share.computed_tokens for share in shares),
    )


class TrainedModel(RankedModel):
    """A model with an optimizer, whose weights can be exported, saved and loaded."""

    _num_waiting = 0

    def _train(self, batch: Batch, objective: Objective, *, temperature: float = 1.0, **wanted: bool) -> StepResult:
        self._check_no_gradients("train_step")
        check_temperature(temperature)
        check_trainable(batch)
        shares, rows = self._shares(batch)
        parts = self._call_shares(RankTrainer.train_step, shares, objective, temperature=temperature, **wanted)
        result, stepped = joined(batch, rows, [share for share, _ in parts]), parts[0][1]
        self.step = stepped.step
        return StepResult(
            step=stepped.step,
            loss=result.loss,
            grad_norm=stepped.grad_norm,
            learning_rate=stepped.learning_rate,
            metrics=result.metrics,
            is_applied=stepped.is_applied,
            broken_rows=result.broken_rows,
            tokens=result.tokens,
            computed_tokens=result.computed_tokens,
        )

    def _check_no_gradients(self, who: str) -> None:
        """Check that no gradients wait for an optimizer step, which `who` would mix with others or lose."""
        if self._num_waiting:
            raise NotReadyError(
                f"{who} is not possible while the gradients of {self._num_waiting} forward_backward calls wait. Call "
                "optim_step to use them, or zero_grad to discard them."
            )

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return all weights by Hugging Face name.

        Weights on ranks in this process are views on their device, valid until the next step; those in other processes
        are copied to the CPU.
        """
        return self._export("weights", self._shapes())

    def offer_weights(self, options: SenderOptions, *, version: int) -> WeightUpdate:
        """Let engines fetch each rank's part of the weights until the weights change.

        Args:
            options: How to send. Ranks with a GPU send over NCCL, and the ranks share the bytes of a bucket.
            version: Policy version of the weights.

        Raises:
            WeightProofError: The ranks' parts do not make up a whole tensor; the message names it.
        """
        offers = self._ranks.call_all(RankHost.offer, self._name, options, version=version)
        return join_offers(offers, self._shapes(), version=version, tied=self.tied)

    def expect_engines(self, num_receivers: int) -> None:
        """Set how many engines the ranks expect. Thread-safe."""
        self._ranks.expect_engines(self._name, num_receivers)

    def _export(self, what: Exported, names: Iterable[str]) -> dict[str, Tensor]:
        """Assemble whole tensors from the ranks' pieces, in the order of their names."""
        found = self._ranks.call_all(RankHost.export, self._name, what, on_host=not self._ranks.is_inline)
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
        """Write a checkpoint into an empty directory; see `rl_distill.learner.Learner.save`."""
        ranks = self._ranks
        require_empty(directory)
        ranks.call_all(RankHost.begin_save, self._name, directory / STATE_FOLDER)
        adapter = self._trained_adapter()
        pending = PendingSave(partial(self._finish_save, ranks, directory, step=self.step, adapter=adapter))
        if not in_background:
            pending.wait()
        return pending

    @converts_arguments
    def load(self, directory: Path, *, with_optimizer: bool = True) -> None:
        """Continue from `save`, whatever the parallel layout it was written with.

        Args:
            directory: The checkpoint.
            with_optimizer: Continue the optimizer too; False starts at step 0 with the weights.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or of another model; the learner is unchanged.
        """
        self._check_no_gradients("load")
        adapter = self._trained_adapter()
        options, also = self._options, ("average",) if self._average_decay else ()
        step = read_header(
            directory, config=self._source.config, dtype=options.dtype, algorithm=options.algorithm, adapter=adapter
        )
        TensorFolder(directory / STATE_FOLDER).check(state_shapes(self._saved_shapes(), self._source.config, also=also))
        problems = self._ranks.call_all(RankHost.read_state, self._name, directory / STATE_FOLDER)
        if any(problems):
            self._ranks.call_all(RankHost.forget_state, self._name)
            raise CheckpointError(next(problem for problem in problems if problem))
        step = step if with_optimizer else 0
        self._ranks.call_all(RankHost.apply_state, self._name, step=step)
        self.step = step

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor in a checkpoint: the adapter's, or all weights."""
        return adapter_shapes(self._source.config, self._lora) if self._lora.rank else self._shapes()

    def _trained_adapter(self) -> TrainedAdapter | None:
        """Return the adapter that trains instead of the weights; None if the weights train."""
        if not self._lora.rank:
            return None
        modules, base = tuple(adapted_modules(self._source.config, self._lora)), self._source.policy_dir
        return TrainedAdapter(options=self._lora, modules=modules, base=base, base_digest=self._base_digest)

    @cached_property
    def _base_digest(self) -> str:
        """Digest of the frozen weights under the adapter."""
        return fingerprint_tensors(self._export("base", self._shapes()).items())

    def _finish_save(self, ranks: LearnerRanks, directory: Path, *, step: int, adapter: TrainedAdapter | None) -> None:
        """Wait for the ranks to write their files, then write the index files and finally the header.

        The model may be closed meanwhile, as long as its ranks are alive.
        """
        written, names = ranks.finish_save(directory / STATE_FOLDER), list(self._saved_shapes())
        source, options = self._source, self._options
        finish_checkpoint(directory, written, source=source, names=names, options=options, step=step, adapter=adapter)
