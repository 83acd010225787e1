"""Metrics of validation; `{source}` is a data source, `{variable}` a variable such as acc or reward."""

from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.entries import ZERO, mean, one

MAIN = "the source's main variable (acc, else reward)"
ANY = "any variable"


def _estimates(section: str, of: str) -> tuple[Metric, ...]:
    """Return the estimates of a variable in one of the two sections."""
    stem = f"{section}/{{source}}/{{variable}}"
    drawn = "n of a prompt's responses, drawn with replacement"
    entries = (
        ("mean@{n}", f"Mean over a prompt's n responses, then over prompts, of {of}."),
        (
            "pass@{n}",
            f"Unbiased probability that at least one of n responses passes, mean over prompts with n or more, of {of}.",
        ),
        ("best@{n}/mean", f"Expected maximum of {drawn}, mean over prompts, of {of}."),
        ("best@{n}/std", f"Standard deviation of the maximum of {drawn}, mean over prompts, of {of}."),
        ("maj@{n}/mean", f"Expected value of the majority prediction among {drawn}, mean over prompts, of {of}."),
        ("maj@{n}/std", f"Standard deviation of the value of the majority prediction among {drawn}, of {of}."),
    )
    return tuple(mean(f"{stem}/{name}", "1", meaning, over="prompt") for name, meaning in entries)


VALIDATION = (
    *_estimates("val-core", MAIN),
    *(
        one(
            f"val-core/{{source}}/{{variable}}/{{estimate}}@{{n}}/{end}",
            "1",
            f"{side} end of the 95 % interval of that mean (mean, pass, best, maj), by a bootstrap over prompts.",
        )
        for end, side in (("ci_low", "Lower"), ("ci_high", "Upper"))
    ),
    *_estimates("val-aux", ANY),
    mean(
        "val-aux/{source}/{variable}/std@{n}",
        "1",
        "Standard deviation over a prompt's n responses, mean over prompts with two or more.",
        over="prompt",
    ),
    mean(
        "val-aux/{source}/{variable}/worst@{n}/mean",
        "1",
        "Expected minimum of n of a prompt's responses, drawn with replacement, mean over prompts.",
        over="prompt",
    ),
    mean(
        "val-aux/{source}/{variable}/worst@{n}/std",
        "1",
        "Standard deviation of that minimum, mean over prompts.",
        over="prompt",
    ),
    one(
        "val-aux/{source}/{variable}/num_missing",
        "responses",
        "Responses without this variable, which its other metrics ignore.",
        reduction="sum",
        healthy=ZERO,
    ),
    one("val-aux/{source}/num_prompts", "prompts", "Validation prompts of the source.", reduction="sum"),
    one("val-aux/{source}/num_responses", "responses", "Validation responses of the source.", reduction="sum"),
    one(
        "test/accuracy",
        "1",
        "Mean over the test set of the component `acc`, or of a reward that is 0 or 1 by definition.",
    ),
    one("test/mean_reward", "1", "Mean reward on the test set."),
    one("test/score", "1", "Mean over the test set's sources of acc, or of the reward in those without it."),
    one(
        "validation/is_exact",
        "bool",
        "1 if the step's own weights sampled every token of the validation, so that its checkpoint can be the best.",
    ),
    one("validation/policy_version/min", "versions", "Oldest version of a validation's tokens.", reduction="min"),
    one("validation/policy_version/max", "versions", "Newest version of a validation's tokens.", reduction="max"),
)
