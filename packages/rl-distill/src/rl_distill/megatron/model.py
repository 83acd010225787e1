"""megatron's GPTModel for a Hugging Face configuration, scoring tokens of packed trajectories."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_distill.megatron.convert import Shard, padded_vocab_size
from rl_distill.megatron.model_spec import block_spec
from rl_distill.megatron.placed import PlacedPack
from rl_distill.objectives.vocabulary import vocabulary_logprobs
from rl_distill.policy_config import PolicyConfig

_CHUNK_LOGITS = 2**25
"""Logits that are alive at once; more are made in chunks, and again in the backward pass."""

Head = Literal["policy", "value"]
"""What comes out: logprobs and entropy of tokens, or values of the states before them."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a policy or a critic says of this rank's tokens.

    Attributes:
        values: [M] float32, logprobs of the tokens, or values of the states before them.
        entropy: [M] float32, of the distribution that each token was drawn from; None of a critic.
    """

    values: Tensor
    entropy: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where they are; megatron's schedules ask."""
        return self.values.device


class PolicyModel(GPTModel):  # type: ignore[misc]
    """This rank's part of a GPTModel, whose output is what a policy or a critic needs."""

    def __init__(
        self,
        policy: PolicyConfig,
        config: TransformerConfig,
        *,
        shard: Shard,
        virtual_stage: int | None = None,
        head: Head = "policy",
    ) -> None:
        """Build the part.

        Args:
            policy: What config.json says.
            config: megatron's configuration of it.
            shard: Which part.
            virtual_stage: Which of this rank's chunks; None where it has one.
            head: What comes out.
        """
        super().__init__(
            config,
            block_spec(config, vp_stage=virtual_stage),
            vocab_size=padded_vocab_size(policy, shard.tensor_size),
            max_sequence_length=policy.max_position_embeddings,
            pre_process=shard.has_embedding,
            post_process=shard.has_head,
            position_embedding_type="none",  # PackedAttention rotates, by the layout's tables
            share_embeddings_and_output_weights=policy.is_tied and head == "policy",
            vp_stage=virtual_stage,
        )
        self._num_tokens_known = policy.vocab_size
        self.value_head: torch.nn.Linear | None = None
        if self.post_process and head == "value":
            del self.output_layer
            self.value_head = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        elif self.post_process and config.sequence_parallel:
            # The head sees chosen tokens, gathered before: it shares no sequence, and sums its input's gradient.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _is_in_embd_group(self) -> bool:
        """Always False: both copies of a tied embedding are filled from the same tensor, not from one another."""
        return False

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Leave the hidden states as they are; `forward` scores only the tokens it is asked for."""
        return hidden_states

    def forward(self, placed: PlacedPack, *, temperature: float = 1.0) -> Tensor | Scored:
        """Score tokens of a pack.

        Args:
            placed: The pack, as this rank sees it.
            temperature: Divides the logits.

        Returns:
            The scores, or on a pipeline stage without the head, the hidden states.
        """
        ids, positions = placed.input_ids[None], placed.position_ids[None]
        hidden = super().forward(ids, positions, None, packed_seq_params=placed.layout)
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            hidden = hidden.index_select(0, placed.kept)
        if self.value_head is not None:
            return Scored(self.value_head(hidden).flatten().float())
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        targets = placed.targets
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
        group: Any = self.pg_collection.tp
        return vocabulary_logprobs(
            logits.squeeze(1), targets, temperature=temperature, group=group, vocab_size=self._num_tokens_known
        )
