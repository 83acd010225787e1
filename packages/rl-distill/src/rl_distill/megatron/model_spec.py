"""Megatron's configuration and layer specification of a Hugging Face policy."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.linear_map import linear_map
from rl_distill.megatron.attention.layout import PackedLayout
from rl_distill.megatron.attention.packed import PackedAttention
from rl_distill.megatron.kernels import PLAIN, Kernels, PolicyTransformerConfig, layers_of
from rl_distill.megatron.layers import SwiGLU, forget_between
from rl_distill.megatron.lora import with_adapter
from rl_distill.megatron.mixture import dispatch_locally, mixture_settings, mixture_spec
from rl_distill.megatron.parallel import megatron_sizes
from rl_distill.options import LoraOptions, ParallelOptions

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
"""Fusions that need apex or CUDA kernels, and features of Transformer Engine beyond its layers."""

_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class PolicyLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer. A mixture layer routes tokens to the experts given in the layout."""

    def __init__(self, *args: Any, is_last: bool = False, **kwargs: Any) -> None:
        """Build the layer.

        Args:
            *args: Arguments of Megatron's layer.
            is_last: True for the layer before the head. After its attention only `kept` tokens continue, because no
                other is read.
            **kwargs: Keyword arguments of Megatron's layer.
        """
        super().__init__(*args, **kwargs)
        self.is_last = is_last
        if self.is_moe_layer:
            dispatch_locally(self.mlp)
        self.recomputes_mlp = False
        if self.config.recompute_granularity == "selective":
            self._recompute(self.config.recompute_modules)

    def _recompute(self, modules: Collection[str]) -> None:
        """Replace Megatron's recomputation, except that of core attention.

        Megatron would recompute a mixture without the given experts, and a norm with Transformer Engine.
        """
        self.recompute_input_layernorm = self.recompute_pre_mlp_layernorm = self.recompute_mlp = False
        if self.is_moe_layer:
            self.mlp.moe_layer_recompute = False
        self.recomputes_mlp = ("moe" if self.is_moe_layer else "mlp") in modules
        if "layernorm" in modules:
            between = [(self.input_layernorm, self.self_attention)]
            if not self.recomputes_mlp:  # otherwise its norm is recomputed with it
                between.append((self.pre_mlp_layernorm, self.mlp))
            for norm, reader in between:
                if not isinstance(norm, IdentityOp):  # an IdentityOp's reader applies the norm itself
                    forget_between(norm, reader)

    def forward(self, *args: Any, packed_seq_params: PackedLayout, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run Megatron's layer, [T, 1, hidden] to [T, 1, hidden]."""
        hidden, context = self._forward_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
        kept = packed_seq_params.kept if self.is_last else None
        if kept is not None:
            hidden = _select_rows(hidden, kept)
        experts = self._experts(packed_seq_params, kept, num_tokens=hidden.shape[0]) if self.is_moe_layer else None
        compute = partial(self._forward_experts, experts=experts) if self.is_moe_layer else self._forward_mlp
        is_again = self.recomputes_mlp and self.training
        hidden = tensor_parallel.checkpoint(compute, False, hidden) if is_again else compute(hidden)
        if experts is not None:
            self._count_rows(packed_seq_params, experts)
        return hidden, context

    def _forward_experts(self, hidden: Tensor, *, experts: Tensor | None) -> Tensor:
        """Apply norm, mixture of experts and residual sum. Tokens use the given experts, also during recomputation."""
        with self.mlp.router.replaying(experts):
            return self._forward_mlp(hidden)  # type: ignore[no-any-return]

    def _experts(self, layout: PackedLayout, kept: Tensor | None, *, num_tokens: int) -> Tensor | None:
        """Return the [num_tokens, top_k] experts that this layer's tokens must use; None if none are given."""
        if layout.experts is None:
            return None
        experts = layout.experts[:, self.layer_number - 1]
        if kept is not None:
            return experts.index_select(0, kept)
        if self.config.sequence_parallel:
            return experts.narrow(0, self.tp_group.rank() * num_tokens, num_tokens)
        return experts

    def _count_rows(self, layout: PackedLayout, experts: Tensor) -> None:
        """Record how many rows were replayed and rerouted. A recomputed layer records the same numbers."""
        if layout.routed is None:
            return
        is_given = (experts >= 0).all(-1)
        if layout.kept is not None and self.config.sequence_parallel and self.layer_number == self.config.num_layers:
            is_kept = torch.zeros(len(experts) * self.tp_group.size(), dtype=torch.bool, device=experts.device)
            is_kept.index_fill_(0, layout.kept, True)  # count only the rows that other layouts compute
            is_given = is_given & is_kept.narrow(0, self.tp_group.rank() * len(experts), len(experts))
        rerouted = is_given & self.mlp.router.rerouted
        layout.routed[self.layer_number - 1] = torch.stack([is_given.sum(), rerouted.sum()])


def _select_rows(rows: Tensor, kept: Tensor) -> Tensor:
    """Select rows, each at most once. The gradient is a copy; that of index_select would accumulate."""
    num_rows = len(rows)

    def select(rows: Tensor, kept: Tensor) -> Tensor:
        return rows.index_select(0, kept)

    def put_back(grad: Tensor, kept: Tensor) -> Tensor:
        return grad.new_zeros(num_rows, *grad.shape[1:]).index_copy_(0, kept, grad)

    return linear_map(rows, kept, forward=select, backward=put_back)


def transformer_config(
    policy: PolicyConfig,
    *,
    dtype: torch.dtype,
    init_method: Callable[[Tensor], object] | None,
    parallel: ParallelOptions = ParallelOptions(),  # noqa: B008 - frozen
    recompute: bool = False,
    recompute_modules: Collection[str] = (),
    kernels: Kernels = PLAIN,
) -> PolicyTransformerConfig:
    """Return Megatron's configuration of a policy.

    Args:
        policy: The policy's configuration.
        dtype: Dtype of the parameters.
        init_method: Function that fills a weight in place; None draws from a normal distribution with the policy's
            standard deviation.
        parallel: Parallel layout of the policy.
        recompute: True to recompute each layer's activations in the backward pass.
        recompute_modules: Parts of a layer to recompute if the whole layer is not.
        kernels: Implementation of each part of the model.
    """
    recomputation: dict[str, Any] = _FULL_RECOMPUTE if recompute else {}
    if recompute_modules:
        recomputation = {"recompute_granularity": "selective", "recompute_modules": list(recompute_modules)}
    return PolicyTransformerConfig(
        kernels=kernels,
        num_layers=policy.num_layers,
        hidden_size=policy.hidden_size,
        ffn_hidden_size=policy.ffn_hidden_size,
        num_attention_heads=policy.num_heads,
        num_query_groups=policy.num_key_value_heads,
        kv_channels=policy.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=policy.norm_eps,
        qk_layernorm=policy.has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # builds SwiGLU below, not a Transformer Engine module
        add_bias_linear=False,
        add_qkv_bias=policy.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        init_method=init_method,
        output_layer_init_method=init_method,
        init_method_std=policy.initializer_range,
        use_cpu_initialization=True,
        # False would not mark tensor-parallel parameters, and grad norms would be silently wrong.
        perform_initialization=True,
        cuda_graph_scope=[],
        calculate_per_token_loss=True,
        sequence_parallel=parallel.sequence,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=False,
        **megatron_sizes(parallel),
        **recomputation,
        **mixture_settings(policy),
        **_WITHOUT_FUSIONS,
    )


def block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
    adapted: Collection[str] = (),
) -> TransformerBlockSubmodules:
    """Return the specification of this pipeline stage's pre-norm layers with packed attention.

    Args:
        config: Result of `transformer_config`.
        vp_stage: Index among the stage's chunks; None if it has one.
        lora: Options of the adapter.
        adapted: Hugging Face names of the adapted matrices in all layers.
    """
    start = get_transformer_layer_offset(config, vp_stage)
    stop = start + get_num_layers_to_build(config, vp_stage)
    layers = [
        _layer_spec(config, index, lora, {name.rsplit(".")[-1] for name in adapted if f".layers.{index}." in name})
        for index in range(start, stop)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=layers_of(config.kernels).norm)


def _layer_spec(config: TransformerConfig, index: int, lora: LoraOptions, adapted: Collection[str]) -> ModuleSpec:
    column, row, norm = layers_of(config.kernels)
    head_norm = norm if config.qk_layernorm else None

    def matrix(kind: type, *names: str) -> type | ModuleSpec:
        return with_adapter(kind, [name for name in names if name in adapted], lora)

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=matrix(column, "q_proj", "k_proj", "v_proj"),
            core_attention=PackedAttention,
            linear_proj=matrix(row, "o_proj"),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    dense = MLPSubmodules(
        linear_fc1=matrix(column, "gate_proj", "up_proj"),
        linear_fc2=matrix(row, "down_proj"),
        activation_func=SwiGLU,
    )
    is_mixture = config.num_moe_experts is not None and bool(config.moe_layer_freq[index])
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=mixture_spec(dense) if is_mixture else ModuleSpec(module=MLP, submodules=dense),
        mlp_bda=get_bias_dropout_add,
    )
    # With sequence parallelism each rank has part of the tokens and the head gathers all, so none can be dropped.
    is_last = index == config.num_layers - 1 and not config.sequence_parallel
    return ModuleSpec(module=PolicyLayer, params={"is_last": is_last}, submodules=submodules)
