"""megatron's GPTModel for a Hugging Face configuration, scoring tokens of packed trajectories."""

from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_distill.megatron.layout import PackedLayout
from rl_distill.megatron.model_spec import block_spec
from rl_distill.megatron.vocabulary import vocabulary_logprobs
from rl_distill.policy_config import PolicyConfig

_CHUNK_LOGITS = 2**25
"""Logits that are alive at once; more are made in chunks, and again in the backward pass."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs and entropy of tokens.

    Attributes:
        logprobs: [M] float32.
        entropy: [M] float32, of the distribution that each token was drawn from.
    """

    logprobs: Tensor
    entropy: Tensor


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose output is what a policy needs: logprobs and entropy of chosen tokens."""

    def __init__(self, policy: PolicyConfig, config: TransformerConfig) -> None:
        """Build the model.

        Args:
            policy: What config.json says.
            config: megatron's configuration of it.
        """
        super().__init__(
            config,
            block_spec(config),
            vocab_size=policy.vocab_size,
            max_sequence_length=policy.max_position_embeddings,
            position_embedding_type="none",  # PackedAttention rotates, by the layout's tables
            share_embeddings_and_output_weights=policy.is_tied,
        )

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Leave the hidden states as they are; `forward` scores only the tokens it is asked for."""
        return hidden_states

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        layout: PackedLayout,
        scored: Tensor,
        temperature: float = 1.0,
    ) -> Tensor | Scored:
        """Score tokens of a pack.

        Args:
            input_ids: [T] int64.
            position_ids: [T] int64.
            layout: The pack's layout.
            scored: [M] int64 indices of the tokens to score, none the first of its trajectory.
            temperature: Divides the logits.

        Returns:
            The scores, or on a pipeline stage without the head, the hidden states [T, 1, hidden].
        """
        layout = replace(layout, kept=scored - 1)
        hidden = super().forward(input_ids[None], position_ids[None], None, packed_seq_params=layout)
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]
        targets = input_ids.index_select(0, scored)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        size = max(1, _CHUNK_LOGITS // max(1, self.vocab_size))
        if len(targets) <= size:
            return Scored(*self._score(hidden, targets, weight, temperature))
        chunks = [
            checkpoint(self._score, h, t, weight, temperature, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        ]
        return Scored(torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks]))

    def _score(
        self, hidden: Tensor, targets: Tensor, weight: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits, _ = self.output_layer(hidden, weight=weight)
        return vocabulary_logprobs(logits.squeeze(1), targets, temperature=temperature, group=self.pg_collection.tp)
