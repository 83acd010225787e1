"""megatron's GPTModel for a Hugging Face configuration, scoring tokens of packed trajectories."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_distill.megatron.attention import PackedAttention
from rl_distill.megatron.layout import PackedLayout
from rl_distill.megatron.norm import RMSNorm
from rl_distill.megatron.vocabulary import vocabulary_logprobs
from rl_distill.policy_config import PolicyConfig

_CHUNK_LOGITS = 2**25
"""Logits that are alive at once; more are made in chunks, and again in the backward pass."""


_WITHOUT_FUSIONS = dict.fromkeys(
    (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
        "batch_p2p_comm",
    ),
    False,
)
"""Kernels of Transformer Engine, apex or CUDA alone."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs and entropy of tokens.

    Attributes:
        logprobs: [M] float32.
        entropy: [M] float32, of the distribution that each token was drawn from.
    """

    logprobs: Tensor
    entropy: Tensor


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, keeping its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grads[0])
        torch.mul(grads[0], up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return out


class SwiGLU(torch.nn.Module):
    """The gated activation, [..., 2 * ffn] to [..., ffn]; gate first."""

    def __init__(self, config: Any) -> None:  # noqa: ARG002 - megatron's signature
        """Take what megatron gives an activation."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Gate and multiply."""
        return _SwiGLUFunction.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Keep(torch.autograd.Function):
    """Some rows, each at most once; index_select's gradient would add where a copy does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.num_rows, *grads[0].shape[1:]).index_copy_(0, kept, grads[0]), None


class LastLayer(TransformerLayer):  # type: ignore[misc]
    """The layer before the head: nobody reads other tokens after its attention, so only `kept` go on."""

    def forward(self, *args: Any, packed_seq_params: PackedLayout, **kwargs: Any) -> tuple[Tensor, Any]:
        """As megatron's layer, giving [M, 1, hidden] of the layout's kept tokens."""
        hidden, context = self._forward_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params.kept is not None:
            hidden = _Keep.apply(hidden, packed_seq_params.kept)  # type: ignore[no-untyped-call]
        return self._forward_mlp(hidden), context


def transformer_config(
    policy: PolicyConfig, *, dtype: torch.dtype, init_method: Callable[[Tensor], object] | None
) -> TransformerConfig:
    """megatron's configuration of a policy.

    Args:
        policy: What config.json says.
        dtype: Of the parameters.
        init_method: Fills a weight; None draws from a normal distribution with the policy's deviation.
    """
    return TransformerConfig(
        num_layers=policy.num_layers,
        hidden_size=policy.hidden_size,
        ffn_hidden_size=policy.ffn_hidden_size,
        num_attention_heads=policy.num_heads,
        num_query_groups=policy.num_key_value_heads,
        kv_channels=policy.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=policy.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # builds SwiGLU below; nothing of Transformer Engine
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        init_method=init_method,
        output_layer_init_method=init_method,
        init_method_std=policy.initializer_range,
        use_cpu_initialization=True,
        # False would skip marking tensor-parallel parameters, and grad norms would be wrong without a word.
        perform_initialization=True,
        cuda_graph_scope=[],
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no secret; variable_seq_lengths asks for it, dense too
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        **_WITHOUT_FUSIONS,
    )


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Decoder of pre-norm layers with packed attention, without Transformer Engine."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=tensor_parallel.ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=tensor_parallel.RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=tensor_parallel.ColumnParallelLinear,
            linear_fc2=tensor_parallel.RowParallelLinear,
            activation_func=SwiGLU,
        ),
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    kinds = [TransformerLayer] * (config.num_layers - 1) + [LastLayer]
    layers = [ModuleSpec(module=kind, submodules=submodules) for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


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
