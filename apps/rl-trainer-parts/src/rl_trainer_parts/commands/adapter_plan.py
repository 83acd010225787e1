"""What `train --dry-run` prints of an adapter: what trains, what an update takes, and its learning rate."""

from collections.abc import Iterator

from rl_distill import PolicyConfig, adapted_modules, adapter_size, count_parameters
from rl_trainer_parts.settings.schema import Settings

BYTES = {"float32": 4, "bfloat16": 2}
MIB = 2**20
FULL_TRAINING_RATE = 1e-5
"""Learning rates of full training in reinforcement learning are seldom above it."""


def describe_adapter(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Lines of the plan; none where all weights train.

    Args:
        settings: Of the run.
        config: Of its policy.
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
    yield f"             begins with {lora.path or 'an adapter that changes nothing'}"
    if lora.serving == "adapter":
        yield f"  an update  {trained * size / MIB:.2f} MiB, beside weights that engines keep (lora.serving = adapter)"
    else:
        yield f"  an update  {total * size / MIB:.2f} MiB, all weights with the adapter in them (lora.serving = merged)"
    yield from _learning_rate(settings.learner.learning_rate)


def _learning_rate(rate: float) -> Iterator[str]:
    if rate > FULL_TRAINING_RATE:
        yield f"  rate       {rate:g}; LoRA's usual learning rate is ten times full training's"
        return
    yield f"  rate       learner.learning_rate = {rate:g} looks like full training's;"
    yield f"             LoRA's usual learning rate is ten times that, {10 * rate:g}"
