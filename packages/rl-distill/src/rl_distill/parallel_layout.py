"""What a parallel layout must divide; refused before a process starts."""

from rl_core.errors import SettingsError
from rl_distill.options import ParallelOptions
from rl_distill.policy_config import PolicyConfig


def check_layout(parallel: ParallelOptions, config: PolicyConfig) -> None:
    """Refuse a layout that does not divide the ranks, or the policy.

    Raises:
        SettingsError: Names the setting, what was found, and what would do.
    """
    check_ranks(parallel)
    heads, groups = config.num_heads, config.num_key_value_heads
    chunks = parallel.pipeline * parallel.virtual_pipeline
    _check_divides("num_attention_heads", heads, "tensor", parallel.tensor)
    _check_divides("num_key_value_heads", groups, "tensor", parallel.tensor)
    _check_divides("intermediate_size", config.ffn_hidden_size, "tensor", parallel.tensor)
    _check_divides("num_hidden_layers", config.num_layers, "pipeline * virtual_pipeline", chunks)
    local_heads, local_groups = heads // parallel.tensor, groups // parallel.tensor
    if local_heads % parallel.context or (local_groups % parallel.context and parallel.context % local_groups):
        raise SettingsError(
            f"context = {parallel.context} must divide the {local_heads} attention heads of a tensor rank, and divide "
            f"or be a multiple of its {local_groups} key-value heads: context-parallel ranks share the heads. "
            f"Set context to one of {_possible_contexts(local_heads, local_groups)}."
        )
    _check_experts(parallel, config)


def check_ranks(parallel: ParallelOptions) -> None:
    """Refuse a layout that no policy could have.

    Raises:
        SettingsError: A size is no whole number of at least 1, or the sizes do not divide the ranks.
    """
    if found := list(parallel.problems()):
        raise SettingsError(" ".join(found))
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.ranks % model_ranks:
        raise SettingsError(
            f"ranks = {parallel.ranks} must be a multiple of tensor * pipeline * context = {parallel.tensor} * "
            f"{parallel.pipeline} * {parallel.context} = {model_ranks}; what is left over is data parallelism."
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise SettingsError(
            f"virtual_pipeline = {parallel.virtual_pipeline} needs pipeline > 1; found 1. Set virtual_pipeline = 1."
        )
    if parallel.sequence and parallel.tensor == 1:
        raise SettingsError("sequence = true needs tensor > 1; found 1. Set sequence = false.")


def _check_experts(parallel: ParallelOptions, config: PolicyConfig) -> None:
    mixture = config.mixture
    if mixture is None:
        if parallel.expert > 1:
            raise SettingsError(
                f"expert = {parallel.expert} needs a mixture of experts; this policy is dense. Set expert = 1."
            )
        if parallel.expert_tensor not in (None, parallel.tensor):
            raise SettingsError(
                f"expert_tensor = {parallel.expert_tensor} needs a mixture of experts; this policy is dense. Leave it "
                "at none."
            )
        return
    expert_tensor = parallel.expert_tensor or parallel.tensor
    _check_divides("num_experts", mixture.num_experts, "expert", parallel.expert)
    shared = mixture.shared_ffn_hidden_size
    _check_divides("n_shared_experts * moe_intermediate_size", shared, "tensor", parallel.tensor)
    _check_divides("moe_intermediate_size", mixture.ffn_hidden_size, "expert_tensor", expert_tensor)
    expert_ranks = expert_tensor * parallel.expert * parallel.pipeline
    if parallel.ranks % expert_ranks:
        raise SettingsError(
            f"ranks = {parallel.ranks} must be a multiple of expert_tensor * expert * pipeline = {expert_tensor} * "
            f"{parallel.expert} * {parallel.pipeline} = {expert_ranks}; set expert_tensor = 1, or more ranks."
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise SettingsError(
            f"a mixture of experts with tensor = {parallel.tensor} needs sequence = true: megatron trains no other."
        )


def _check_divides(field: str, value: int, setting: str, size: int) -> None:
    if value % size:
        divisors = [number for number in range(1, value + 1) if value % number == 0]
        raise SettingsError(
            f"{setting} = {size} must divide the policy's {field} = {value}; possible: "
            f"{', '.join(map(str, divisors[:12]))}."
        )


def _possible_contexts(heads: int, groups: int) -> list[int]:
    return [size for size in range(1, heads + 1) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
