"""The part of `train --dry-run` about an adapter: trained parameters, update size, learning rate."""

from collections.abc import Iterator

from rl_distill import PolicyConfig, adapted_modules, adapter_size, count_parameters
from rl_trainer_parts.settings.schema import Settings

BYTES = {"float32": 4, "bfloat16": 2}
MIB = 2**20
FULL_TRAINING_RATE = 1e-5
"""Learning rates for full RL training are rarely above this."""


def describe_adapter(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Lines of the plan; empty when all weights train.

    Args:
        settings: The run's settings.
        config: The policy's configuration.
    """
    lora = settings.lora
    if not lora.rank:
        return
    targets, total = adapted_modules(config, lora), count_parameters(config).total
    trained, size = adapter_size(config, lora), BYTES[settings.learner.dtype]
    modules = dict.fromkeys(name.rpartition(".")[2] for name in targets)
    yield "Adapter"
    yield f"  trains     {trained:,} of {total:,} parameters ({trained / total:.2%}), the others stay as they are"
    yield f"             rank {lora.rank}, B @ A times {lora.scaling:g}, beside {len(targets)} matrices:"
    yield f"             {', '.join(modules)}"
    yield f"             begins with {lora.path or 'an adapter without effect'}"
    if lora.serving == "adapter":
        yield f"  an update  {trained * size / MIB:.2f} MiB, beside the base in the engines (lora.serving = adapter)"
    else:
        yield f"  an update  {total * size / MIB:.2f} MiB, all weights, adapter merged in (lora.serving = merged)"
    yield from _learning_rate(settings.learner.learning_rate)


def _learning_rate(rate: float) -> Iterator[str]:
    if rate > FULL_TRAINING_RATE:
        yield f"  rate       {rate:g}; LoRA usually needs ten times the learning rate of full training"
        return
    yield f"  rate       learner.learning_rate = {rate:g} looks like full training's;"
    yield f"             LoRA usually needs ten times that, {10 * rate:g}"
