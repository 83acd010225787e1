"""Reference learner: transformers' model on padded batches with torch's AdamW; serves as the oracle in tests.

Imports transformers, which the extra `rl-distill[megatron]` installs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from rl_core.data import Batch, Ragged
from rl_core.errors import SettingsError
from rl_core.record_fields import converts_arguments
from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import is_trained
from rl_distill.checkpoints.checkpoint import (
    DTYPES,
    STATE_FOLDER,
    finish_checkpoint,
    read_header,
    require_empty,
    state_shapes,
)
from rl_distill.checkpoints.hf_folder import PolicyTensors, read_heads
from rl_distill.checkpoints.pieces import Piece, TensorFolder, write_pieces
from rl_distill.learner import (
    LearnerOptions,
    MicroBatch,
    Objective,
    PendingSave,
    StepResult,
    metric_totals,
    metric_values,
)
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.micro_batches import (
    LOSSES,
    MEASURED,
    WEIGHTED,
    TeacherComparison,
    comparison_of,
    with_columns,
)
from rl_distill.objectives.teacher_tokens import teacher_tokens
from rl_distill.objectives.vocabulary import VocabularyPart
from rl_distill.packing import Pack, pack_batch, unpack_trained, unpack_values
from rl_distill.products import chosen_products, computing_with
from rl_distill.stepping import check_open, check_trainable, clip_scale, learning_rate_at, open_policy

__all__ = ["TorchLearner"]


class _Expert(nn.Module):
    """A gated feed-forward layer with the names of a Hugging Face folder."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class _SeparateExperts(nn.ModuleList):
    """The experts of a layer as separate modules; transformers fuses all of them into two parameters."""

    def __init__(self, mixture: MixtureConfig, hidden_size: int, std: float) -> None:
        super().__init__(_Expert(hidden_size, mixture.ffn_hidden_size) for _ in range(mixture.num_experts))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return outputs [T, hidden] for hidden states [T, hidden], expert indices and weights [T, top_k]."""
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            tokens, places = torch.where(chosen == index)
            weighted = expert(hidden[tokens]) * shares[tokens, places, None]
            out = out.index_add(0, tokens, weighted.to(out.dtype))
        return out


def reference_model(config_json: Mapping[str, Any], config: PolicyConfig, *, dtype: torch.dtype) -> Any:
    """Return transformers' model with random weights and the folder's tensor names.

    A router's bias is a float32 parameter without gradient.

    Args:
        config_json: Content of config.json.
        config: The parsed config.json.
        dtype: dtype of the parameters.
    """
    model_class = getattr(transformers, config.architecture)
    model = model_class(model_class.config_class(**config_json))
    for index, layer in enumerate(model.model.layers):
        if config.mixture is not None and config.is_mixture(index):
            layer.mlp.experts = _SeparateExperts(config.mixture, config.hidden_size, config.initializer_range)
    model = model.to(dtype)
    for layer in config.mixture.layers if config.mixture is not None and config.mixture.sigmoid is not None else ():
        gate = model.model.layers[layer].mlp.gate
        del gate.e_score_correction_bias
        gate.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
    return model


class TorchLearner:
    """A learner on plain torch, in one process; see `rl_distill.learner.Learner`.

    Attributes:
        step: Optimizer steps taken so far.
    """

    @converts_arguments
    def __init__(
        self, policy: Path | Mapping[str, Any], options: LearnerOptions, *, device: torch.device | None = None
    ) -> None:
        """Build the policy.

        Args:
            policy: A Hugging Face folder with safetensors, or the content of a config.json for random weights.
            options: Options of the learner.
            device: Device of the model; None for the CPU.

        Raises:
            SettingsError: The architecture or a setting is not supported.
            DataError: A file or tensor of the folder is missing or incomplete.
        """
        options.check()
        self._source = open_policy(policy, backend="megatron")
        dtype = DTYPES[options.dtype]
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._device = device or torch.device("cpu")
        products = chosen_products(options.products) if self._device.type == "cpu" else "torch"
        self._options = options = replace(options, products=products)
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            model = reference_model(self._source.config_json, self._source.config, dtype=dtype)
            self._model: Any = model.to(self._device)
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        if self._source.policy_dir is not None:
            self._copy_weights(dict(PolicyTensors(self._source.policy_dir, self._source.config).whole(dtype)))
        is_main = dtype == torch.float32
        self._mains = {n: p if is_main else p.detach().float().clone() for n, p in self._parameters.items()}
        self._adam = _adamw(list(self._mains.values()), options)
        self.step = 0
        self._teacher_heads: list[Tensor] = []

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the policy; a tied head counts once."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def tied(self) -> Mapping[str, str]:
        """Return the names that share another name's tensor."""
        return self._source.config.tied

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return float32 logprobs of all tokens in the batch's row order; 0 at the first token of each trajectory."""
        check_open(self._model)
        packs = self._packs(batch)
        with computing_with(self._options.products), torch.no_grad():
            values = [self._score(pack, temperature)[0] for pack in packs]
        return unpack_values(packs, values, batch)

    def train_step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> StepResult:
        """Take one optimizer step on the whole batch.

        Raises:
            ShapeError: loss_weights is missing, all zero, or nonzero outside loss_mask.
        """
        check_open(self._model)
        check_trainable(batch)
        step = self.step + 1
        self._model.zero_grad()
        loss, metrics, scored = 0.0, [], []
        packs = self._packs(batch)
        for pack in packs:
            with computing_with(self._options.products):
                logprobs, entropy, logits = self._score(pack, temperature)
                micro = self._compared(pack, logits, comparison_of(objective))
                part, sums = objective(logprobs, entropy if with_entropy else None, micro)
                part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            metrics.append(sums)
            scored.append({"policy_logprobs": logprobs.detach(), "entropy": entropy.detach()})
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._mains[name].grad = parameter.grad.float()
        grads = [main.grad for main in self._mains.values() if main.grad is not None]
        grad_norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        learning_rate = learning_rate_at(step, self._options)
        is_applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_applied:
            self._update(grads, clip_scale(grad_norm, self._options.clip_grad), learning_rate)
            self.step = step
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=metric_values([metric_totals(metrics)]),
            is_applied=is_applied,
            tokens=unpack_trained(packs, scored, batch) if with_tokens else {},
            computed_tokens=len(batch.ragged("input_ids").values),
        )

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return all weights by Hugging Face name, as views that are valid until the next step."""
        check_open(self._model)
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @converts_arguments
    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Write a checkpoint into an empty directory, always in the foreground.

        Raises:
            CheckpointError: The directory is not empty.
        """
        require_empty(directory)
        states = {
            "weights": self._mains,
            "exp_avg": self._moments("exp_avg"),
            "exp_avg_sq": self._moments("exp_avg_sq"),
        }
        pieces = [_piece(f"{kind}/{name}", tensor) for kind, of in states.items() for name, tensor in of.items()]
        written = [write_pieces(directory / STATE_FOLDER, pieces, rank=0)]
        names, source = list(self._mains), self._source
        finish_checkpoint(directory, written, source=source, names=names, options=self._options, step=self.step)
        return PendingSave()

    @converts_arguments
    def load(self, directory: Path) -> None:
        """Resume from a checkpoint that `save` wrote.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or of another model; the learner is unchanged.
        """
        check_open(self._model)
        step = read_header(directory, config=self._source.config, dtype=self._options.dtype)
        shapes = state_shapes({name: tuple(main.shape) for name, main in self._mains.items()}, self._source.config)
        states = {name: torch.empty(shape) for name, shape in shapes.items()}
        folder = TensorFolder(directory / STATE_FOLDER)
        folder.check(shapes)
        folder.read([_piece(name, tensor) for name, tensor in states.items()])
        self._copy_weights({name: states[f"weights/{name}"] for name in self._mains})
        for name, main in self._mains.items():
            main.data.copy_(states[f"weights/{name}"])
            if is_trained(name, self._source.config):
                moments = {m: states[f"{m}/{name}"].to(self._device) for m in ("exp_avg", "exp_avg_sq")}
                self._adam.state[main] = {"step": torch.tensor(float(step)), **moments} if step else {}
        self.step = step

    def offload(self) -> int:
        """Free the gradients; return the bytes freed."""
        freed = sum(p.grad.nbytes for p in self._parameters.values() if p.grad is not None)
        self._model.zero_grad()
        return freed

    def close(self) -> None:
        """Free the model."""
        self._model, self._parameters, self._mains = None, {}, {}

    def _packs(self, batch: Batch) -> list[Pack]:
        if "routed_experts" in batch:
            raise SettingsError(
                "the reference learner cannot replay the column 'routed_experts'; drop it from the batch, or train "
                "with the Megatron learner."
            )
        return pack_batch(batch, max_tokens=self._options.micro_batch_tokens, device=self._device)

    def _copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])

    def _moments(self, name: str) -> dict[str, Tensor]:
        mains = {n: main for n, main in self._mains.items() if is_trained(n, self._source.config)}
        return {n: self._adam.state[m].get(name, torch.zeros_like(m).detach()) for n, m in mains.items()}

    def _update(self, grads: list[Tensor], scale: float, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        if scale < 1.0:
            torch._foreach_mul_(grads, scale)
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._mains[name] is not parameter:
                    parameter.copy_(self._mains[name])

    @converts_arguments
    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Read the teachers' output matrices, for objectives that compare whole distributions.

        Args:
            folders: Hugging Face folders, in the order of the column `teacher_index`.

        Raises:
            SettingsError: A teacher has a smaller vocabulary than the policy.
            DataError: A file or tensor is missing or incomplete.
        """
        dtype = DTYPES[self._options.dtype]
        self._teacher_heads = read_heads(folders, self._source.config, dtype=dtype, device=self._device)

    def _compared(self, pack: Pack, logits: Tensor, comparison: TeacherComparison | None) -> MicroBatch:
        """Return the micro-batch with columns that compare the logits [T, V] with the teachers'."""
        micro = pack.micro_batch
        if comparison is None:
            return micro
        part = VocabularyPart(self._source.config.vocab_size)
        compare = LogitDivergence(options=comparison.options, part=part, heads=self._teacher_heads)
        measured = compare(logits, teacher_tokens(micro))._asdict()
        columns = {MEASURED + name: values for name, values in measured.items()}
        if comparison.is_alone:
            columns[WEIGHTED] = columns[LOSSES] * micro.columns["loss_weights"]
        return with_columns(micro, columns)

    def _score(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs [T], entropy [T] and logits [T, V] of a pack, computed on a right-padded batch."""
        micro_batch = pack.micro_batch
        rows = torch.repeat_interleave(torch.arange(len(pack.rows), device=self._device), micro_batch.offsets.diff())
        steps = micro_batch.position_ids
        shape = (len(pack.rows), int(steps.max()) + 1)
        ids = torch.zeros(shape, dtype=torch.int64, device=self._device)
        mask = torch.zeros(shape, dtype=torch.int64, device=self._device)
        ids[rows, steps], mask[rows, steps] = micro_batch.input_ids, 1
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        distribution = torch.log_softmax(logits / temperature, dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        is_scored = steps > 0
        before = (rows, (steps - 1).clamp_min(0))
        logprobs = distribution[before].gather(-1, micro_batch.input_ids[:, None]).squeeze(-1)
        return torch.where(is_scored, logprobs, 0.0), torch.where(is_scored, entropy[before], 0.0), logits[before]


def _piece(name: str, tensor: Tensor) -> Piece:
    """Wrap a whole tensor as a piece; on the CPU without a copy, so that it can be read into."""
    shape = tuple(tensor.shape)
    return Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=tensor.detach().cpu().contiguous())


def _adamw(parameters: list[Tensor], options: LearnerOptions) -> torch.optim.AdamW:
    """Return AdamW with Megatron's parameter groups: no weight decay on vectors (the norms)."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
