"""Checks of `[distillation]` that run before models load."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial

from rl_core import Prompt
from rl_core.cluster import ResourcePool, Shares, count_room, describe_shares, machine_shares
from rl_core.errors import DataError, EngineError, SettingsError
from rl_distill import PolicyConfig, check_layout, teacher_layout
from rl_distill.teacher import (
    ESTIMATORS,
    TeacherOptions,
    TeacherRouter,
    check_same_vocabulary,
    count_texts,
    route_problems,
)
from rl_rollout.engines import max_positions
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.learning.objective import has_policy_gradient, learns_from_rewards, objective_options
from rl_trainer_parts.learning.start_learners import rank_pool
from rl_trainer_parts.learning.teachers import teacher_pool
from rl_trainer_parts.rollouts.engines import replica_pool
from rl_trainer_parts.rollouts.setup import text_options
from rl_trainer_parts.rollouts.teacher_prompts import TeacherPrompts
from rl_trainer_parts.settings.fields import problems_of, with_value
from rl_trainer_parts.settings.schema import Settings


def distillation_problems(settings: Settings) -> Iterator[str]:
    """Problems of values and combinations that do not depend on files."""
    chosen = settings.distillation
    found = [f"distillation.{problem}" for problem in chosen.problems()]
    yield from found
    if not chosen.is_on:
        return
    if not found:
        yield from problems_of("distillation: ", objective_options, settings)
    yield from route_problems(chosen)
    if chosen.loss in ESTIMATORS and chosen.temperature != settings.rollout.temperature:
        yield (
            f'distillation.loss = "{chosen.loss}" compares the logprobs of the sampled tokens, so '
            f"distillation.temperature = {chosen.temperature:g} must be rollout.temperature = "
            f"{settings.rollout.temperature:g}."
        )
    yield from _unused(settings)
    yield from _texts(settings)
    if chosen.self_teacher.prompts and settings.rollout.loop in OWN_PROMPTS:
        yield (
            f'rollout.loop = "{settings.rollout.loop}" renders prompts itself, so '
            'distillation.self_teacher.prompts cannot replace them. Use "single_turn", or omit prompts.'
        )
    if not found:
        yield from _pools(settings)


def _unused(settings: Settings) -> Iterator[str]:
    """Problems of policy-gradient settings in a run without a policy gradient."""
    algorithm, correction = settings.algorithm, settings.correction
    if learns_from_rewards(settings):
        return
    need = "needs distillation.use_task_rewards = true; found false"
    if algorithm.advantage == "gae":
        yield f'algorithm.advantage = "gae" {need}. Set another advantage, which is then not used.'
    if algorithm.kl_coefficient and algorithm.kl_in == "reward":
        yield f'algorithm.kl_in = "reward" {need}. Set kl_coefficient = 0, or kl_in = "loss".'
    if has_policy_gradient(settings):
        return
    for name, is_set in {
        "algorithm.kl_coefficient": algorithm.kl_coefficient,
        "algorithm.entropy_coefficient": algorithm.entropy_coefficient,
        "correction.weights": correction.weights != "none",
        "correction.reject": correction.reject,
    }.items():
        if is_set:
            yield f'{name} applies to the policy gradient, so it {need}. Or set distillation.used_as = "reward".'


def _texts(settings: Settings) -> Iterator[str]:
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


OWN_PROMPTS = ("tools", "agent", "verifiers")
"""Loops that render prompts themselves."""


def _pools(settings: Settings) -> Iterator[str]:
    """Problems of teachers for which this machine lacks resources; Ray checks those of a joined cluster."""
    there, before = machine_shares(), list[str]()
    for who, pool in (("the learner", rank_pool(settings)), ("the engine", replica_pool(settings))):
        if pool is not None and _take(there, pool):
            before.append(f"{who} {_described(pool)}")
    for name, teacher in settings.distillation.teachers.items():
        pool = teacher_pool(settings, name)
        if pool is None or (teacher.placement == "ray" and settings.cluster.ray_address is not None):
            continue
        if _take(there, pool):
            before.append(f"teacher {name!r} {_described(pool)}")
            continue
        beside = f" (reserved: {'; '.join(before)})" if before else ""
        yield (
            f"distillation.teachers.{name} reserves {_described(pool)} (replicas = {teacher.replicas}, tensor = "
            f"{teacher.tensor}); this machine has {describe_shares(there.cpus, len(there.gpus))}{beside}: room for "
            f"{count_room(there, pool.cpus, pool.gpus, at_most=pool.size)} of {pool.size}. Reserve less; cpus = 0 "
            "shares the CPUs."
        )


def _take(there: Shares, pool: ResourcePool) -> bool:
    """Reserve a whole pool, or nothing."""
    if count_room(there, pool.cpus, pool.gpus, at_most=pool.size) < pool.size:
        return False
    for _ in range(pool.size):
        there.take(pool.cpus, pool.gpus)
    return True


def _described(pool: ResourcePool) -> str:
    return f"{pool.size} x {describe_shares(pool.cpus, pool.gpus)}"


def teacher_files(settings: Settings) -> Iterator[str]:
    """Problems of the teachers' models."""
    student = None
    with contextlib.suppress(SettingsError, DataError, OSError, ValueError):  # other checks report it
        student = model_config(settings.policy.path)
    chosen = settings.distillation
    if chosen.self_teacher.model is not None and student is not None and chosen.num_top > student.vocab_size:
        yield f"distillation.top_k = {chosen.num_top} exceeds the policy's {student.vocab_size} tokens. Lower it."
    for name, teacher in settings.distillation.teachers.items():
        setting = f"distillation.teachers.{name}"
        found = list(check_policy_folder(teacher.model, setting=f"{setting}.model", file=settings.file))
        yield from found
        if found:
            continue
        yield from (f"{setting}.{problem}" for problem in _lengths(settings, teacher))
        try:
            config = model_config(teacher.model)
            if teacher.engine == "megatron":
                check_layout(teacher_layout(teacher.tensor, config), config)
        except (SettingsError, DataError) as error:
            yield from (f"{setting}: {line}" for line in str(error).splitlines())
        else:
            yield from (f"{setting}{problem}" for problem in _vocabulary(settings, config, student))


def _lengths(settings: Settings, teacher: TeacherOptions) -> Iterator[str]:
    """Problems of a teacher whose context is shorter than the longest trajectory."""
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    wanted = teacher.max_model_len
    added = [with_value(settings, name) for name in ("prompts.max_tokens", "rollout.max_response_tokens")]
    made = f"{' and '.join(added)} add up to {longest} tokens"
    if wanted is not None and wanted < longest:
        yield f"max_model_len = {wanted} is too short: {made}. Raise it, or leave it out."
    with contextlib.suppress(OSError, ValueError, EngineError):  # other checks report a broken config.json
        positions = max_positions(teacher.model)
        if positions < max(longest, wanted or 0):
            yield (
                f"model: {teacher.model} has max_position_embeddings = {positions}, fewer than the longest trajectory "
                f"needs: {made}{'' if wanted in (None, longest) else f', and max_model_len is {wanted}'}. Lower them, "
                "or use a teacher with more positions."
            )


def _vocabulary(settings: Settings, config: PolicyConfig, student: PolicyConfig | None) -> Iterator[str]:
    chosen = settings.distillation
    if chosen.num_top > config.vocab_size:
        yield (
            f": distillation.top_k = {chosen.num_top} exceeds its vocabulary of {config.vocab_size} tokens. Lower it."
        )
    if student is not None and chosen.needs_hidden and config.vocab_size < student.vocab_size:
        yield (
            f" has {config.vocab_size} tokens in its vocabulary, but the policy has {student.vocab_size}, and "
            'distribution = "full" compares all of them. Set it to "top_k".'
        )


def check_teachers(settings: Settings, tokenizer: PromptTokenizer, prompts: Iterable[Prompt]) -> None:
    """Check that teachers' tokenizers, routes, prompts and texts fit the run.

    Args:
        settings: Settings that passed `check_settings`.
        tokenizer: The policy's tokenizer.
        prompts: Training prompts.

    Raises:
        SettingsError: Each line names a teacher, or a route without a teacher.
        DataError: A prompt lacks its text or a column, or texts are too long.
    """
    chosen = settings.distillation
    texts = text_options(settings, tokenizer)
    if texts is not None:
        count_texts(prompts, texts, encode=partial(tokenizer.encode, add_special_tokens=False))
    TeacherPrompts.of(settings, tokenizer).check(prompts)
    if not chosen.teachers:
        return
    found: list[str] = []
    for name, teacher in chosen.teachers.items() if chosen.other_tokenizer == "refuse" else ():
        found += problems_of("", check_same_vocabulary, settings.policy.path, teacher.model, teacher_name=name)
    found += TeacherRouter(chosen).problems(prompts)
    if found:
        raise SettingsError("\n".join(found))
