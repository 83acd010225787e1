"""megatron's configuration and layers for a Hugging Face policy, without Transformer Engine."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rl_distill.megatron.attention import PackedAttention
from rl_distill.megatron.layout import PackedLayout
from rl_distill.megatron.norm import RMSNorm
from rl_distill.megatron.swiglu import SwiGLU
from rl_distill.policy_config import PolicyConfig

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
