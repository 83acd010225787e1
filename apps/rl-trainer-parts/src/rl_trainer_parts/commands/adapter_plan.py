"""The part of `train --dry-run` about an adapter: trained parameters, update size, learning rate."""

from collections.abc import Iterator

from rl_distill import PolicyConfig, adapted_modules, adapter_size, count_parameters
from rl_trainer_parts.commands.output import counted, size_text
from rl_trainer_parts.settings.schema import Settings

BYTES = {"float32": 4, "bfloat16": 2}
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
    trained, size = adapter_size(config, lora), BYTES[settings.optimizer.dtype]
    modules = dict.fromkeys(name.rpartition(".")[2] for name in targets)
    matrices = counted(len(targets), "matrix", "matrices")
    yield "Adapter"
    yield f"  trains     {trained:,} of {total:,} parameters ({trained / total:.2%}); the others are frozen"
    yield f"             rank {lora.rank}, B @ A scaled by {lora.scaling:g}, on {matrices}:"
    yield f"             {', '.join(modules)}"
    yield f"             starts from {lora.path or 'an adapter without effect'}"
    if lora.serving == "adapter":
        yield f"  an update  {size_text(trained * size)}, served beside the base model (lora.serving = adapter)"
    else:
        yield f"  an update  {size_text(total * size)}, all weights with the adapter merged (lora.serving = merged)"
    yield from _learning_rate(settings.optimizer.learning_rate)


def _learning_rate(rate: float) -> Iterator[str]:
    if rate > FULL_TRAINING_RATE:
        yield f"  rate       {rate:g}; LoRA usually needs ten times the learning rate of full training"
        return
    yield f"  rate       optimizer.learning_rate = {rate:g} looks like a rate for full training;"
    yield f"             LoRA usually needs ten times as much, {10 * rate:g}"
