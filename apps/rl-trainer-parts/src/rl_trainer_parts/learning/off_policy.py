"""Off-policy distillation: stored teacher texts replace rollouts."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from rl_core import Prompt
from rl_core.errors import SettingsError
from rl_distill.teacher import TextOptions, count_texts, trajectories_from_texts
from rl_rollout import GroupResult
from rl_rollout.loops import SessionResult
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.settings.schema import Settings


def text_options(settings: Settings, tokenizer: PromptTokenizer) -> TextOptions | None:
    """How texts become trajectories; None when rollouts are generated.

    Raises:
        SettingsError: The tokenizer names no token that ends a text.
    """
    column, end = settings.distillation.texts, tokenizer.eos_token_id
    if column is None:
        return None
    if end is None:
        raise SettingsError(
            f"distillation.texts = {column!r} needs a token that ends a text, but the tokenizer of "
            f"{settings.policy.path} names none. Set eos_token in its tokenizer_config.json."
        )
    return TextOptions(
        column=column,
        end_token_id=end,
        max_response_tokens=settings.rollout.max_response_tokens,
        overlong=settings.prompts.overlong,
    )


def check_texts(settings: Settings, tokenizer: PromptTokenizer, prompts: Iterable[Prompt]) -> None:
    """Check that prompts have texts, before models load.

    Raises:
        DataError: A prompt lacks its text, or all are too long.
        SettingsError: Texts cannot be tokenized.
    """
    options = text_options(settings, tokenizer)
    if options is not None:
        count_texts(prompts, options, encode=_encoder(tokenizer))


def groups_of_texts(prompts: Sequence[Prompt], options: TextOptions, tokenizer: PromptTokenizer) -> list[GroupResult]:
    """A group per prompt, with one session per text; a group whose texts are all too long fails."""
    trajectories = trajectories_from_texts(prompts, options, encode=_encoder(tokenizer))
    by_prompt = {uid: list(own) for uid, own in itertools.groupby(trajectories, key=lambda one: one.prompt_uid)}
    dropped = SessionResult(failure=f"every text in column {options.column!r} is too long")
    return [
        GroupResult(
            prompt=prompt,
            sessions=tuple(SessionResult(trajectories=(one,)) for one in by_prompt.get(prompt.uid, ())) or (dropped,),
        )
        for prompt in prompts
    ]


def text_problems(settings: Settings) -> Iterator[str]:
    """Problems of settings that do not apply to texts from a teacher."""
    chosen = settings.distillation
    if chosen.texts is None:
        return
    column = f"distillation.texts = {chosen.texts!r}"
    if chosen.use_task_rewards or chosen.used_as == "reward":
        yield (
            f"{column} trains on texts that the policy did not sample, so there is no policy gradient. Set "
            'distillation.use_task_rewards = false and used_as = "loss".'
        )
    if chosen.loss in ("k1", "abs", "k2", "k3"):
        yield (
            f'{column}: loss = "{chosen.loss}" needs tokens that the policy sampled. Use "forward_kl", '
            '"reverse_kl" or "js", or "nll" without a teacher.'
        )
    if chosen.other_tokenizer == "align" and chosen.teachers:
        yield f'{column} and other_tokenizer = "align" cannot be combined. Leave one of them out.'
    for name, is_set in (
        ("dynamic_sampling.filter", settings.dynamic_sampling.filter),
        ("rollout_cache.enabled", settings.rollout_cache.enabled),
    ):
        if is_set:
            yield f"{column} generates no rollouts, so {name} has no effect. Leave it out."
    if settings.algorithm.old_logprobs == "recompute":
        yield f'{column} needs algorithm.old_logprobs = "rollout"; found "recompute".'


def _encoder(tokenizer: PromptTokenizer) -> "partial[list[list[int]]]":
    return partial(tokenizer.encode, add_special_tokens=False)
