"""Inputs that a run reads before models load: tokenizer, prompts, reward."""

import asyncio
import datetime
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.images import ImageStore
from rl_core.terminal_text import counted
from rl_rollout.engines import RolloutEngine, ScriptedEngine, model_end_tokens, vocabulary_size
from rl_rollout.prompts import PromptOptions, PromptSet, PromptTokenizer, load_prompts
from rl_rollout.rewards import JudgeModel, RewardScorer, build_scorer
from rl_rollout.skip import prompt_digest
from rl_trainer_parts.settings.fields import with_value
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A run's inputs, checked.

    Attributes:
        tokenizer: The policy's tokenizer.
        train: Training prompts.
        validation: Prompts evaluated during training, if any.
        test: Prompts evaluated at the start and the end, if any.
        data: Prompts of other files to evaluate, by name, instead of validation and test.
    """

    tokenizer: PromptTokenizer
    train: PromptSet
    validation: PromptSet | None
    test: PromptSet | None
    data: Mapping[str, PromptSet] = field(default_factory=dict)

    @property
    def evaluated(self) -> dict[str, PromptSet]:
        """The prompts to evaluate, by name: those of `data`, or else of validation and test."""
        own = {"validation": self.validation, "test": self.test}
        return dict(self.data) or {name: prompts for name, prompts in own.items() if prompts is not None}

    @property
    def splits(self) -> tuple[PromptSet, ...]:
        """The prompts of all kinds."""
        return (self.train, *self.evaluated.values())

    @property
    def num_images(self) -> int:
        """Number of images in all prompts."""
        return sum(split.num_images for split in self.splits)


def shows_images(settings: Settings, inputs: Inputs) -> bool:
    """Return whether the policy may get images: of prompts, or of tools, environments and agents."""
    if inputs.num_images:
        return True
    has_turns = settings.rollout.loop not in ("single_turn", "verifiers") and not settings.distillation.is_on
    return has_turns and inputs.tokenizer.sees_images


def with_kept_images(settings: Settings, inputs: Inputs) -> Inputs:
    """Inputs whose images are kept in the run's folder, where engines and learner read them.

    Raises:
        SettingsError: The image processor cannot be used.
    """
    if not shows_images(settings, inputs):
        return inputs
    folder = settings.run_folder / "images"
    folder.mkdir(exist_ok=True)
    for split in inputs.splits:
        split.keep_images(ImageStore(folder))
    return replace(inputs, tokenizer=read_tokenizer(settings))


def input_notes(settings: Settings, inputs: Inputs) -> Iterator[str]:
    """Warnings about plain text sent to a chat model, hidden tools, and responses that cannot end."""
    if not inputs.train[0].messages and inputs.tokenizer.has_chat_template:
        yield (
            "the prompts are plain text and reach the model unchanged, although its tokenizer has a chat template; "
            'prompts.plain_prompts = "chat" turns each into a user message'
        )
    if inputs.tokenizer.sees_images and (unplaced := sum(split.num_unplaced for split in inputs.splits)):
        yield (
            f"{counted(unplaced, 'prompt has', 'prompts have')} <image> in the text and no image, so that the policy "
            "reads the word; images belong in the column `images`"
        )
    turns = settings.rollout.loop_options.get("turns")
    has_plain_turns = isinstance(turns, Mapping) and turns.get("kind") == "plain"
    if settings.rollout.loop == "tools" and (not inputs.train[0].messages or has_plain_turns):
        why = 'turns.kind is "plain"' if has_plain_turns else "the prompts are plain text"
        yield f"no chat template shows the model its tools, because {why}; the prompts themselves must describe them"
    splits = inputs.splits if settings.prompts.template_options else ()
    if splits and not any(prompt.messages for split in splits for prompt in split):
        yield "prompts.template_options has no effect without prompts in the form of messages"
    named, own = model_end_tokens(settings.policy.path), inputs.tokenizer.eos_token_id
    if named and own is not None and own not in named:
        yield (
            f"the model in {settings.policy.path} ends a response at token {' or '.join(map(str, named))}, and its "
            f"tokenizer at token {own}; responses end at all of them"
        )
    if not named:
        yield (
            f"{settings.policy.path} names no end token, so every response continues until it is truncated; set "
            "eos_token_id in its generation_config.json to the token that ends a turn in its chat template"
        )


def read_inputs(settings: Settings, data: Mapping[str, Path] | None = None) -> Inputs:
    """Read and check every input that is not a model.

    Args:
        settings: The run's settings.
        data: Files to evaluate, by name, instead of validation and test.

    Raises:
        DataError: A file or row cannot be used.
        SettingsError: The tokenizer or reward function cannot be used, or there are too few prompts.
    """
    tokenizer = read_tokenizer(settings)
    check_vocabulary(settings, tokenizer)
    named_tokens(settings, tokenizer)
    options = PromptOptions(
        max_tokens=settings.prompts.max_tokens,
        overlong=settings.prompts.overlong,
        plain_prompts=settings.prompts.plain_prompts,
        requires_ground_truth=settings.prompts.requires_ground_truth,
        max_images=settings.prompts.max_images,
        image_folders=settings.prompts.image_folders,
        image_urls=settings.prompts.image_urls,
    )

    def load(path: Path | None) -> PromptSet | None:
        return None if path is None or data else load_prompts([path], tokenizer, options)

    train = load_prompts([settings.prompts.train], tokenizer, options)
    if len(train) < settings.rollout.prompts_per_step:
        raise SettingsError(
            f"{with_value(settings, 'rollout.prompts_per_step')}, but {settings.prompts.train} has "
            f"{len(train)} prompts, and a step uses each prompt at most once. Lower it, or provide more prompts."
        )
    inputs = Inputs(
        tokenizer=tokenizer,
        train=train,
        validation=load(settings.prompts.validation),
        test=load(settings.prompts.test),
        data={name: load_prompts([path], tokenizer, options) for name, path in (data or {}).items()},
    )
    if settings.rollout_cache.enabled:
        prompt_digest(train[0])  # before models load
    with closing(make_scorer(settings, tokenizer, ScriptedEngine({}))) as scorer:  # check it before models load
        asyncio.run(scorer.rehearse(train[0]))
    return inputs


def read_tokenizer(settings: Settings) -> PromptTokenizer:
    """The policy's tokenizer.

    Raises:
        SettingsError: It cannot be used.
    """
    date = settings.prompts.date
    return PromptTokenizer.load(
        settings.policy.path,
        template_options=settings.prompts.template_options,
        date=None if date is None else datetime.date.fromisoformat(date),
        image_folder=settings.image_folder,
    )


def check_vocabulary(settings: Settings, tokenizer: PromptTokenizer) -> None:
    """Check that models know all tokens of the policy's tokenizer.

    Raises:
        SettingsError: Names both files and their sizes.
    """
    policy, needed = settings.policy.path, tokenizer.num_token_ids
    for setting, folder in (("policy.path", policy), ("critic.path", settings.critic.path)):
        if folder is not None and (size := vocabulary_size(folder)) < needed:
            raise SettingsError(
                f"{setting}: {folder / 'config.json'} has vocab_size = {size}, but the tokenizer in {policy} has "
                f"token ids up to {needed - 1}. Use the model's own tokenizer, or resize the embeddings to {needed} "
                f"tokens (transformers: model.resize_token_embeddings({needed}), then save_pretrained)."
            )


def named_tokens(settings: Settings, tokenizer: PromptTokenizer) -> list[int]:
    """Ids of the tokens in `metrics.probe_tokens`.

    Raises:
        SettingsError: A text is not one token, or an id is not a token's.
    """
    found = []
    for one in settings.metrics.probe_tokens:
        ids = [one] if isinstance(one, int) else tokenizer.encode([one], add_special_tokens=False)[0]
        if isinstance(one, int) and not 0 <= one < tokenizer.num_token_ids:
            last = tokenizer.num_token_ids - 1
            raise SettingsError(f"metrics.probe_tokens: ids must be from 0 to {last} in this tokenizer; found {one}.")
        if len(ids) != 1:
            texts = tokenizer.decode([[token] for token in ids], skip_special_tokens=False)
            pieces = ", ".join(f"{text!r} ({token})" for text, token in zip(texts, ids, strict=True)) or "none"
            raise SettingsError(
                f"metrics.probe_tokens: each text must be one token; {one!r} is {len(ids)} tokens: {pieces}. Name one "
                "of them, by its text or its id."
            )
        found += ids
    return found


def make_scorer(settings: Settings, tokenizer: PromptTokenizer, engine: RolloutEngine) -> RewardScorer:
    """The scorer that the settings describe; a judge reward uses the engine.

    Raises:
        SettingsError: An option, name or file is wrong.
        MissingExtraError: A reward needs a library that is not installed.
    """
    try:
        return build_scorer(settings.reward, parts={"model": JudgeModel.with_tokenizer(engine, tokenizer)})
    except SettingsError as error:
        raise SettingsError(f"reward: {error}") from error
