"""Megatron's GPTModel for a Hugging Face configuration, which scores tokens of packed trajectories."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_distill.architecture.lora_targets import adapted_modules
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.convert import Shard, padded_vocab_size
from rl_distill.megatron.head import HeadRequest, HeadScores, OutputLayer, head_scores, logits_at_once
from rl_distill.megatron.model_spec import block_spec
from rl_distill.megatron.rank_batches import PlacedPack
from rl_distill.objectives.chunked_head import HeadResult, chunked_head_divergence
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.micro_batches import MEASURED, WEIGHTED, TeacherComparison
from rl_distill.objectives.vocabulary import VocabularyPart, nucleus_logprobs
from rl_distill.options import LoraOptions

R = TypeVar("R")

Head = Literal["policy", "value"]
"""Output of a model: logprobs and entropy of tokens, or values of the states before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRequest:
    """Requested outputs of a policy besides its tokens' logprobs and entropy.

    Attributes:
        temperature: Divisor of the logits.
        top_k: Number of most probable tokens to return after the token itself; None for none.
        has_hidden: True to return the last hidden states.
        comparison: Comparison with teachers; None for none.
        heads: Teachers' output matrices, for comparisons of whole distributions.
    """

    temperature: float = 1.0
    top_k: int | None = None
    has_hidden: bool = False
    comparison: TeacherComparison | None = None
    heads: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class TokenResults:
    """Results of a policy or critic for this rank's tokens.

    Attributes:
        values: [M] float32 logprobs of the tokens, [M, K] of several targets each, or [M] values of the states before
            them.
        entropy: [M] float32 entropy of the distribution of each token; None for a critic.
        others: [M, ...] results by name: "logprobs" and "ids" [M, K + 1] of the most probable tokens, "hidden" [M, H],
            and the results of a comparison with teachers.
    """

    values: Tensor
    entropy: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def within_nucleus(self, placed: PlacedPack) -> "TokenResults":
        """Return a policy's results under the truncated distributions of a pack with `nucleus_ids`; else these."""
        if not placed.has_nucleus or self.entropy is None:
            return self
        return TokenResults(*nucleus_logprobs(self.values, placed.targets), self.others)

    @property
    def device(self) -> torch.device:
        """Device of the results. Megatron's schedules read it."""
        return self.values.device

    @property
    def trained(self) -> Tensor:
        """Scalar sum of all results that have a gradient. Gives a rank without tokens a loss to backpropagate."""
        tensors = [self.values, *([] if self.entropy is None else [self.entropy]), *self.others.values()]
        return torch.stack([one.sum() for one in tensors if one.requires_grad]).sum()


class TokenScoring:
    """The end of a policy or critic: results of tokens from their last hidden states.

    Attributes:
        config: Megatron's configuration, with the kernels.
        value_head: A critic's head; None for a policy.
    """

    config: Any
    value_head: torch.nn.Linear | None

    def _with_head(self, compute: Callable[[Tensor], R]) -> R:
        """Return the function of the output matrix [V / ranks, H]."""
        raise NotImplementedError

    @property
    def _part(self) -> VocabularyPart:
        """Slice of the vocabulary that this rank's output matrix covers."""
        raise NotImplementedError

    def _results(self, hidden: Tensor, placed: PlacedPack, wanted: OutputRequest) -> TokenResults:
        """Return the requested results for tokens with hidden states [M, H]."""
        if self.value_head is not None:
            return TokenResults(self.value_head(hidden).flatten().float())
        if wanted.comparison is not None and wanted.comparison.is_alone:
            return self._compare_alone(hidden, placed, wanted, self._divergence(wanted.comparison, wanted))
        found = self._score(hidden, placed, wanted)
        if wanted.has_hidden:
            found["hidden"] = hidden.float()
        return TokenResults(found.pop("values"), found.pop("entropy"), found)

    def _score(self, hidden: Tensor, placed: PlacedPack, wanted: OutputRequest) -> dict[str, Tensor]:
        """Return the requested results for tokens with hidden states [M, H]."""
        comparison = wanted.comparison
        request = HeadRequest(
            part=self._part,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            divergence=None if comparison is None else self._divergence(comparison, wanted),
            is_fused=self.config.kernels.is_fused,
        )
        teacher = None if comparison is None else placed.teacher
        compute = partial(head_scores, hidden, targets=placed.targets, request=request, teacher=teacher)
        scores: HeadScores = self._with_head(compute)
        found = {"values": scores.logprobs, "entropy": scores.entropy}
        if scores.top_logprobs is not None and scores.top_ids is not None:
            found["logprobs"] = torch.cat([scores.logprobs.unsqueeze(-1), scores.top_logprobs], -1)
            found["ids"] = torch.cat([placed.targets.unsqueeze(-1), scores.top_ids], -1)
        if scores.comparison is not None:
            found |= {MEASURED + name: value for name, value in scores.comparison._asdict().items()}
        return found

    def _divergence(self, comparison: TeacherComparison, wanted: OutputRequest) -> LogitDivergence:
        """Return the function that compares this rank's logits with teachers."""
        return LogitDivergence(options=comparison.options, part=self._part, heads=wanted.heads)

    def _compare_alone(
        self, hidden: Tensor, placed: PlacedPack, wanted: OutputRequest, divergence: LogitDivergence
    ) -> TokenResults:
        """Compare with teachers in a single pass that also computes the gradients."""
        compute = partial(
            chunked_head_divergence,
            hidden,
            weights=placed.loss_weights,
            teacher=placed.teacher,
            divergence=divergence,
            targets=placed.targets,
            temperature=wanted.temperature,
            chunk_logits=logits_at_once(hidden.device, is_alone=True),
        )
        found: HeadResult = self._with_head(compute)
        measured = {MEASURED + name: value for name, value in found.comparison._asdict().items()}
        logprobs = found.weighted.detach() if found.logprobs is None else found.logprobs
        return TokenResults(logprobs, found.entropy, {WEIGHTED: found.weighted, **measured})


class PolicyModel(TokenScoring, GPTModel):  # type: ignore[misc]
    """This rank's part of a GPTModel, with the output of a policy or a critic."""

    def __init__(
        self,
        policy: PolicyConfig,
        config: TransformerConfig,
        *,
        shard: Shard,
        virtual_stage: int | None = None,
        head: Head = "policy",
        lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
    ) -> None:
        """Build the part.

        Args:
            policy: The policy's configuration.
            config: Megatron's configuration of the policy.
            shard: Part of the policy that this rank holds.
            virtual_stage: Index among this rank's chunks; None if it has one.
            head: Output of the model.
            lora: Options of the adapter; rank 0 for none.
        """
        super().__init__(
            config,
            block_spec(config, vp_stage=virtual_stage, lora=lora, adapted=adapted_modules(policy, lora)),
            vocab_size=padded_vocab_size(policy, shard.tensor_size),
            max_sequence_length=policy.max_position_embeddings,
            pre_process=shard.has_embedding,
            post_process=shard.has_head,
            position_embedding_type="none",  # PackedAttention applies the rotary embedding
            share_embeddings_and_output_weights=policy.is_tied and head == "policy",
            vp_stage=virtual_stage,
        )
        self._num_tokens_known = policy.vocab_size
        if lora.rank and self.pre_process and config.recompute_granularity is not None:
            self.embedding.register_forward_hook(_with_gradient)
        self.value_head = None
        if self.post_process and head == "value":
            del self.output_layer
            self.value_head = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        elif self.post_process:
            self.output_layer.__class__ = OutputLayer  # GPTModel has no option for the class

    def _is_in_embd_group(self) -> bool:
        """Return False: both copies of a tied embedding are loaded from the same tensor and need no synchronization."""
        return False

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Return the hidden states unchanged; `forward` scores only the requested tokens."""
        return hidden_states

    def forward(self, placed: PlacedPack, *, wanted: OutputRequest = OutputRequest()) -> Tensor | TokenResults:
        """Score tokens of a pack.

        Args:
            placed: The pack, laid out for this rank.
            wanted: The requested outputs.

        Returns:
            The scores; on a pipeline stage without the head, the hidden states.
        """
        ids, positions = placed.input_ids[None], placed.position_ids[None]
        hidden = super().forward(ids, positions, None, packed_seq_params=placed.layout)
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            hidden = hidden.index_select(0, placed.kept)
        hidden = placed.to_score(hidden).squeeze(1)
        return self._results(hidden, placed, wanted)

    def _with_head(self, compute: Callable[[Tensor], R]) -> R:
        """See `TokenScoring`."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(compute, tied)  # type: ignore[no-any-return]

    @property
    def _part(self) -> VocabularyPart:
        group: Any = self.pg_collection.tp
        return VocabularyPart(self._num_tokens_known, group if group.size() > 1 else None)


def _with_gradient(_module: torch.nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    """Return a frozen embedding's output with a gradient, without which recomputed layers backpropagate nothing."""
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded
