"""Checks of a parallel layout, and of options that depend on it, before any process starts."""

import math
from collections.abc import Iterator

from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions


def teacher_layout(ranks: int, config: PolicyConfig) -> ParallelOptions:
    """Return a teacher's layout: tensor-parallel matrices, and experts spread over ranks as their number allows."""
    if config.mixture is None or ranks == 1:
        return ParallelOptions(ranks=ranks, tensor=ranks)
    expert = math.gcd(ranks, config.num_experts)
    return ParallelOptions(ranks=ranks, tensor=ranks, sequence=True, expert=expert, expert_tensor=ranks // expert)


def check_layout(
    parallel: ParallelOptions,
    config: PolicyConfig,
    *,
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
) -> None:
    """Check that a layout divides the ranks and the policy's sizes, and that an adapter can train in it.

    Raises:
        SettingsError: It does not; each line names a setting, its value and the possible values.
    """
    if config.model_json:
        found = [*_whole_problems(parallel, config, lora)]
    elif parallel.shard_weights:
        found = [
            f"shard_weights = true needs a model that transformers' class computes; {config.architecture} is computed "
            "by our layers. Set it to false and distributed_optimizer to true, and divide the weights by tensor, "
            'pipeline or expert; or use the backend "transformers".'
        ]
    else:
        found = [*_dense_problems(parallel, config), *_expert_problems(parallel, config)]
    if problems := [*_rank_problems(parallel), *found]:
        raise SettingsError("\n".join(problems))


def check_learner(
    options: LearnerOptions,
    parallel: ParallelOptions,
    config: PolicyConfig,
    *,
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
) -> None:
    """Check that learner options fit the layout, the policy and its adapter.

    Raises:
        SettingsError: They do not; each line names an option, its value and the possible values.
    """
    if problems := list(_learner_problems(options, parallel, config, lora)):
        raise SettingsError("\n".join(problems))


def _learner_problems(
    options: LearnerOptions, parallel: ParallelOptions, config: PolicyConfig, lora: LoraOptions
) -> Iterator[str]:
    if parallel.shard_weights:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(options, name):
                yield f"{name} = true has no effect with parallel.shard_weights = true, which always overlaps. Omit it."
    elif options.overlap_param_gather and not parallel.distributed_optimizer:
        yield (
            "overlap_param_gather needs parallel.distributed_optimizer = true; found false. Without it, each rank "
            "updates all of its weights, and there is nothing to gather. Set it, or set overlap_param_gather = false."
        )
    if options.algorithm == "muon":
        yield from _muon_problems(parallel, config, lora)
    if options.trains_vision and config.image_token_id is None:
        yield f"trains_vision = true needs a policy with a vision tower; {config.architecture} has none. Omit it."
    if options.trains_vision and lora.rank:
        yield f"trains_vision = true trains no adapter; found lora.rank = {lora.rank}. Set one to its default."
    if config.model_json and options.recompute == "selective":
        yield (
            f'recompute = "selective" chooses among our layers\' modules; {config.architecture} is computed by '
            'transformers\' class. Set recompute = "full" or "none".'
        )
        return
    num_mixtures = 0 if config.mixture is None else len(config.mixture.layers)
    layers = {"moe": num_mixtures, "mlp": config.num_layers - num_mixtures}
    for module in options.recompute_modules if options.recompute == "selective" else ():
        if layers.get(module) == 0:
            what = "a mixture of experts" if module == "moe" else "a dense MLP"
            yield f'recompute_modules has "{module}", but no layer of this policy has {what}; remove it.'
    if options.kernels == "transformer_engine" and lora.rank:
        yield (
            f'kernels = "transformer_engine" does not support adapters; found lora.rank = {lora.rank}. Set kernels = '
            '"fused", or lora.rank = 0.'
        )


def _muon_problems(parallel: ParallelOptions, config: PolicyConfig, lora: LoraOptions) -> Iterator[str]:
    for name in ("distributed_optimizer", "shard_weights"):
        if getattr(parallel, name):
            yield (
                f'algorithm = "muon" needs whole matrices, and parallel.{name} = true divides each of them over the '
                'data-parallel ranks. Set it to false, or algorithm = "adam".'
            )
    if lora.rank:
        yield f'algorithm = "muon" trains no adapters; found lora.rank = {lora.rank}. Set algorithm = "adam".'
    if config.model_json:
        yield (
            f'algorithm = "muon" trains the matrices of our layers; {config.architecture} is computed by '
            'transformers\' class. Set algorithm = "adam".'
        )


def _whole_problems(parallel: ParallelOptions, config: PolicyConfig, lora: LoraOptions) -> Iterator[str]:
    """Yield what divides a model, which only our layers can."""
    has_images = config.image_token_id is not None
    sharded = "" if has_images else ", or shard_weights = true to divide all of the model's"
    for name in ("tensor", "pipeline", "context", "expert", "virtual_pipeline"):
        size = getattr(parallel, name)
        if size > 1:
            yield (
                f"{name} = {size} needs layers that ranks can divide; {config.architecture} is computed by "
                f"transformers' class. Set {name} = 1, and distributed_optimizer = true to divide the optimizer's "
                f"memory{sharded}."
            )
    if parallel.shard_weights and parallel.distributed_optimizer:
        yield (
            "distributed_optimizer = true has no effect with shard_weights = true, which divides the optimizer's state "
            "too. Set distributed_optimizer = false."
        )
    if parallel.shard_weights and lora.rank:
        yield f"shard_weights = true cannot train adapters; found lora.rank = {lora.rank}. Set one to its default."
    if parallel.shard_weights and has_images:
        yield f"shard_weights = true does not divide {config.architecture}, a policy with images. Omit it."
    if parallel.expert_tensor not in (None, 1):
        yield (
            f"expert_tensor = {parallel.expert_tensor} needs layers that ranks can divide; {config.architecture} is "
            "computed by transformers' class. Leave it at none."
        )


def _dense_problems(parallel: ParallelOptions, config: PolicyConfig) -> Iterator[str]:
    heads, groups, tensor = config.num_heads, config.num_key_value_heads, parallel.tensor
    chunks = parallel.pipeline * parallel.virtual_pipeline
    yield from _not_divided("num_attention_heads", heads, "tensor", tensor)
    yield from _not_divided("num_key_value_heads", groups, "tensor", tensor)
    yield from _not_divided("intermediate_size", config.ffn_hidden_size, "tensor", tensor)
    yield from _not_divided("num_hidden_layers", config.num_layers, "pipeline * virtual_pipeline", chunks)
    if heads % tensor or groups % tensor:
        return
    local_heads, local_groups = heads // tensor, groups // tensor
    if local_heads % parallel.context or (local_groups % parallel.context and parallel.context % local_groups):
        yield (
            f"context = {parallel.context} must divide the {local_heads} attention heads of a tensor rank, and divide "
            f"or be a multiple of its {local_groups} key-value heads: context-parallel ranks share the heads. "
            f"Set context to one of {_possible_contexts(local_heads, local_groups)}."
        )


def check_ranks(parallel: ParallelOptions) -> None:
    """Check a layout without a policy.

    Raises:
        SettingsError: A size does not divide the ranks; one line per size.
    """
    if problems := list(_rank_problems(parallel)):
        raise SettingsError("\n".join(problems))


def _rank_problems(parallel: ParallelOptions) -> Iterator[str]:
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.ranks % model_ranks:
        yield (
            f"ranks = {parallel.ranks} must be a multiple of tensor * pipeline * context = {parallel.tensor} * "
            f"{parallel.pipeline} * {parallel.context} = {model_ranks}; the quotient is the data-parallel size."
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield f"virtual_pipeline = {parallel.virtual_pipeline} needs pipeline > 1; found 1. Set virtual_pipeline = 1."
    if parallel.sequence and parallel.tensor == 1:
        yield "sequence = true needs tensor > 1; found 1. Set sequence = false."


def _expert_problems(parallel: ParallelOptions, config: PolicyConfig) -> Iterator[str]:
    mixture = config.mixture
    if mixture is None:
        if parallel.expert > 1:
            yield f"expert = {parallel.expert} needs a mixture of experts; this policy is dense. Set expert = 1."
        if parallel.expert_tensor not in (None, parallel.tensor):
            yield (
                f"expert_tensor = {parallel.expert_tensor} differs from tensor = {parallel.tensor}, which needs a "
                "mixture of experts; this policy is dense. Leave it at none."
            )
        return
    expert_tensor = parallel.expert_tensor or parallel.tensor
    if parallel.tensor % expert_tensor:
        yield (
            f"expert_tensor = {expert_tensor} must divide tensor = {parallel.tensor}: the ranks that split an expert "
            "must compute the same sequences. Leave it at none, or set expert_tensor = 1."
        )
    yield from _not_divided("num_experts", mixture.num_experts, "expert", parallel.expert)
    shared = mixture.shared_ffn_hidden_size
    yield from _not_divided("n_shared_experts * moe_intermediate_size", shared, "tensor", parallel.tensor)
    yield from _not_divided("moe_intermediate_size", mixture.ffn_hidden_size, "expert_tensor", expert_tensor)
    expert_ranks = expert_tensor * parallel.expert * parallel.pipeline
    if parallel.ranks % expert_ranks:
        yield (
            f"ranks = {parallel.ranks} must be a multiple of expert_tensor * expert * pipeline = {expert_tensor} * "
            f"{parallel.expert} * {parallel.pipeline} = {expert_ranks}; set a smaller expert or "
            "expert_tensor, or more ranks."
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"sequence must be true for a mixture of experts with tensor = {parallel.tensor}, since Megatron requires "
            "it; found false."
        )


def _not_divided(field: str, value: int, setting: str, size: int) -> Iterator[str]:
    if value % size:
        divisors = [number for number in range(1, value + 1) if value % number == 0]
        yield (
            f"{setting} = {size} must divide the policy's {field} = {value}; possible values: "
            f"{', '.join(map(str, divisors[:12]))}."
        )


def _possible_contexts(heads: int, groups: int) -> list[int]:
    return [size for size in range(1, heads + 1) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
