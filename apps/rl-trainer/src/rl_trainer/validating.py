"""Evaluate a policy without training it."""

from rl_metrics.validation import headline
from rl_rollout.rollout import Rollout
from rl_trainer.engines import make_engine, start_within
from rl_trainer.evaluation import validation_metrics
from rl_trainer.flow import open_rollout
from rl_trainer.inputs import Inputs
from rl_trainer.settings import Settings


async def validate_policy(settings: Settings, inputs: Inputs) -> dict[str, float]:
    """Greedy accuracy of the policy on the validation and test problems."""
    engine = make_engine(settings, settings.policy.path)
    try:
        await start_within(engine, settings)
        with open_rollout(settings, inputs.tokenizer, engine) as rollout:
            return await evaluate_splits(settings, inputs, rollout)
    finally:
        await engine.close()


async def evaluate_splits(settings: Settings, inputs: Inputs, rollout: Rollout) -> dict[str, float]:
    """Metrics of both splits, each under its name, with `validation_accuracy` and `test_accuracy`."""
    results: dict[str, float] = {}
    for split, prompts in (("validation", inputs.validation), ("test", inputs.test)):
        if prompts is not None:
            metrics, _ = await validation_metrics(
                settings,
                prompts,
                lambda chosen, sampling: rollout.run(chosen, num_sessions=1, sampling=sampling),
            )
            accuracy = headline(metrics)
            results |= {f"{split}/{name}": value for name, value in metrics.items()}
            if accuracy is not None:
                results[f"{split}_accuracy"] = accuracy
    return results
