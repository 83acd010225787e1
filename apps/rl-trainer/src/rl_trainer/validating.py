"""Evaluate a policy without training it."""

from rl_metrics.validation import headline
from rl_rollout.rollout import Rollout
from rl_trainer.answers import answers_of
from rl_trainer.engines import make_engine, start_within
from rl_trainer.evaluation import answer_problems, chosen_problems, summarize_answers
from rl_trainer.flow import open_rollout
from rl_trainer.inputs import Inputs
from rl_trainer.settings import Settings


async def validate_policy(settings: Settings, inputs: Inputs) -> dict[str, float]:
    """What a validation says of the policy, on the validation and test problems."""
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
            groups = await answer_problems(settings, rollout, chosen_problems(settings, prompts))
            metrics = summarize_answers(answers_of(groups, source="validate"))
            accuracy = headline(metrics)
            results |= {f"{split}/{name}": value for name, value in metrics.items()}
            if accuracy is not None:
                results[f"{split}_accuracy"] = accuracy
    return results
