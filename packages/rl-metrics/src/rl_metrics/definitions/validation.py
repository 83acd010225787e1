"""Metrics of validation; `{source}` is a data source, `{variable}` a variable such as acc or reward."""

from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.entries import ZERO, highest, lowest, newest, prompt_mean, total

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
    return tuple(prompt_mean(f"{stem}/{name}", meaning) for name, meaning in entries)


VALIDATION = (
    *_estimates("val-core", MAIN),
    *(
        newest(
            f"val-core/{{source}}/{{variable}}/{{estimate}}@{{n}}/{end}",
            f"{side} end of the 95 % interval of that mean (mean, pass, best, maj), by a bootstrap over prompts.",
        )
        for end, side in (("ci_low", "Lower"), ("ci_high", "Upper"))
    ),
    *_estimates("val-aux", ANY),
    prompt_mean(
        "val-aux/{source}/{variable}/std@{n}",
        "Standard deviation over a prompt's n responses, mean over prompts with two or more.",
    ),
    prompt_mean(
        "val-aux/{source}/{variable}/worst@{n}/mean",
        "Expected minimum of n of a prompt's responses, drawn with replacement, mean over prompts.",
    ),
    prompt_mean("val-aux/{source}/{variable}/worst@{n}/std", "Standard deviation of that minimum, mean over prompts."),
    total(
        "val-aux/{source}/{variable}/num_missing",
        "Responses without this variable, which its other metrics ignore.",
        "responses",
        healthy=ZERO,
    ),
    total(
        "val-aux/{source}/{variable}/{estimate}@{n}/num_prompts",
        "Prompts with enough responses for that mean of `val-core` (mean, pass, best, maj), if not all of the source.",
        "prompts",
    ),
    total("val-aux/{source}/num_prompts", "Validation prompts of the source.", "prompts"),
    total("val-aux/{source}/num_responses", "Validation responses of the source.", "responses"),
    newest(
        "test/accuracy", "Mean over the test set of the component `acc`, or of a reward that is 0 or 1 by definition."
    ),
    newest("test/mean_reward", "Mean reward on the test set."),
    newest("test/score", "Mean over the test set's sources of acc, or of the reward in those without it."),
    newest(
        "validation/is_exact",
        "1 if the step's own weights sampled every token of the validation, so that its checkpoint can be the best.",
        "bool",
    ),
    lowest("validation/policy_version/min", "Oldest version of a validation's tokens.", "versions"),
    highest("validation/policy_version/max", "Newest version of a validation's tokens.", "versions"),
)
