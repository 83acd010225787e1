"""The path of rollouts: the engine's agent loop or stored texts, the queue, the transport of weights and its proof."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from rl_core import Batch, Prompt, Ragged, TaskSpec, Trajectory, TransferQueue
from rl_core.data import ImageSpan, IntArray, Json, column_spec, image_extras
from rl_core.errors import DataError, SettingsError
from rl_core.weights import (
    BFLOAT16_TOLERANCES,
    REROUTED_TOLERANCES,
    ProofTolerances,
    SharedFileTransport,
    TensorTransport,
    WeightTransport,
)
from rl_core.weights.broadcast import BroadcastTransport, DirectTransport, SenderOptions
from rl_core.weights.ipc import IpcTransport
from rl_distill.objectives import component_columns, with_reward_components
from rl_distill.teacher import TextOptions, teacher_task, trajectories_from_texts
from rl_rollout import AuditOptions, GroupResult, Rollout, RolloutOptions
from rl_rollout.engines import RolloutEngine, SamplingParams
from rl_rollout.loops import SessionResult, resolve_loop
from rl_rollout.prompts import PromptSet, PromptTokenizer
from rl_trainer_parts.learning.mixtures import expert_shape, routes_anew
from rl_trainer_parts.learning.objective import gdpo_components, has_teachers, needs_greedy
from rl_trainer_parts.rollouts.inputs import make_scorer
from rl_trainer_parts.rollouts.teacher_prompts import Pairs
from rl_trainer_parts.settings.schema import Settings

TRAIN = "train"
"""The learner's task in the queue."""

ROUTED_EXPERTS, NUCLEUS = "routed_experts", "nucleus_ids"

FLOAT32_TOLERANCE = 0.01
"""Maximum mean difference in nats when a turn is scored again; near ties in a mixture may be routed differently."""

EXTRA = "_rollout"
"""Key of the record's own fields in a row's extras; an agent loop's extra of the same name is dropped."""

WORK = ("generate_s", "tools_s", "reward_s")
"""Timings that add up to a session's time."""


def sampling_params(settings: Settings) -> SamplingParams:
    """Sampling parameters for training; `Rollout.run` sets the seed per prompt."""
    rollout = settings.rollout
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_nucleus=rollout.nucleus_width,
    )


def rollout_columns(settings: Settings) -> frozenset[str]:
    """Columns of every rollout in a run."""
    columns = frozenset({"input_ids", "loss_mask", "rollout_logprobs", "policy_versions", "reward"})
    if settings.distillation.texts is not None:
        columns -= {"reward"}
    if expert_shape(settings) is not None:
        columns |= {ROUTED_EXPERTS}
    if needs_greedy(settings):
        columns |= {"reward_baseline"}
    if settings.rollout.nucleus_width is not None:
        columns |= {NUCLEUS}
    return columns | component_columns(gdpo_components(settings))


def queue_tasks(settings: Settings, *, order: Literal["arrival", "issue"]) -> list[TaskSpec]:
    """Tasks in the queue: teachers score rows, and the learner trains on them.

    Args:
        settings: The run's settings.
        order: Order in which the learner receives groups.
    """
    columns = rollout_columns(settings)
    if not has_teachers(settings):
        return [TaskSpec(name=TRAIN, needs=columns, order=order)]
    teachers = settings.distillation
    scored = teacher_task(with_hidden=teachers.needs_hidden, with_aligner=teachers.other_tokenizer == "align")
    return [scored, TaskSpec(name=TRAIN, needs=columns | scored.gives, order=order)]


def make_transport(settings: Settings, *, is_in_process: bool | None = None) -> WeightTransport:
    """Transport of weights: tensors within a process, else a shared file, GPU memory, or the network.

    Args:
        settings: The run's settings.
        is_in_process: The engine is in the learner's process; None decides by rollout.placement.
    """
    weights = settings.weights
    if settings.rollout.placement == "inline" if is_in_process is None else is_in_process:
        return TensorTransport()
    if weights.transport == "file":
        return SharedFileTransport()
    if weights.transport == "ipc":
        return IpcTransport(bucket_bytes=weights.bucket_mib << 20, keeps=settings.replicas.restarts > 0)
    options = SenderOptions(
        backend="tcp" if weights.transport == "direct" else weights.transport,
        host=weights.host,
        bucket_bytes=weights.bucket_mib << 20,
        deadline_s=weights.deadline_s,
        num_receivers=settings.replicas.count,
    )
    return DirectTransport(options) if weights.transport == "direct" else BroadcastTransport(options)


def canary_prompts(settings: Settings, prompts: PromptSet) -> list[Prompt]:
    """The first prompts, used for the canary; the last of them has an image if any prompt has."""
    chosen = list(range(min(settings.trainer.canary_prompts, len(prompts))))
    with_image = prompts.first_with_image
    if chosen and with_image is not None and with_image > chosen[-1]:
        chosen[-1] = with_image
    return [prompts[index] for index in chosen]


def proof_tolerances(settings: Settings) -> ProofTolerances:
    """Tolerances between engine and learner.

    In float32, both almost always route a mixture's tokens to the same experts. In a coarser dtype some tokens go to
    other experts; unless the learner replays the engine's routing, only the mean of the differences is compared.
    """
    is_exact = settings.vllm.dtype == settings.optimizer.dtype == "float32"
    default = ProofTolerances() if is_exact else BFLOAT16_TOLERANCES
    if settings.trainer.proof_tolerance is not None:
        return replace(default, canary=settings.trainer.proof_tolerance)
    return REROUTED_TOLERANCES if not is_exact and routes_anew(settings) else default


@contextmanager
def open_rollout(
    settings: Settings,
    tokenizer: PromptTokenizer,
    engine: RolloutEngine,
    *,
    served: Callable[[], int | None] | None = None,
) -> Iterator[Rollout]:
    """The agent loop on an engine; rewards and tools are closed at the end.

    Args:
        settings: The run's settings.
        tokenizer: The policy's tokenizer.
        engine: The engine.
        served: See `Rollout`.
    """
    chosen = settings.rollout
    audit = AuditOptions(share=chosen.audit_share, rescored_share=chosen.rescored_share, seed=settings.run.seed)
    if settings.vllm.dtype == "float32":
        audit = replace(audit, rescored_tolerance=FLOAT32_TOLERANCE)
    with closing(make_scorer(settings, tokenizer, engine)) as scorer:
        rollout = Rollout(
            engine,
            resolve_loop(chosen.loop, chosen.loop_options),
            scorer=scorer,
            decode=tokenizer.decode,
            tokenizer=tokenizer,
            options=RolloutOptions(audit=audit),
            served=served,
        )
        with closing(rollout):
            yield rollout


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


def groups_of_texts(prompts: Sequence[Prompt], options: TextOptions, tokenizer: PromptTokenizer) -> list[GroupResult]:
    """A group per prompt, with one session per text; a group whose texts are all too long fails."""
    trajectories = trajectories_from_texts(prompts, options, encode=partial(tokenizer.encode, add_special_tokens=False))
    by_prompt = {uid: list(own) for uid, own in itertools.groupby(trajectories, key=lambda one: one.prompt_uid)}
    dropped = SessionResult(failure=f"every text in column {options.column!r} is too long")
    return [
        GroupResult(
            prompt=prompt,
            sessions=tuple(SessionResult(trajectories=(one,)) for one in by_prompt.get(prompt.uid, ())) or (dropped,),
        )
        for prompt in prompts
    ]


def put_trajectories(queue: TransferQueue, settings: Settings, pairs: Pairs) -> None:
    """Put whole sessions into the queue, with reward components if the advantage compares them.

    Args:
        queue: The queue.
        settings: The run's settings.
        pairs: Prompts with their trajectories.

    Raises:
        DataError: A trajectory lacks such a component, the baseline of ReMax, or the nuclei of truncated sampling.
    """
    trajectories = [trajectory for _, trajectory in pairs]
    width = settings.rollout.nucleus_width
    for one in trajectories if width is not None else ():
        if one.nucleus_ids is None and one.loss_mask.any():
            raise DataError(
                f"rollout.top_p and rollout.top_k need trajectories with nucleus_ids; prompt {one.prompt_uid}, session "
                f"{one.session_index} has none. The engine must report Generation.nucleus_ids, and the loop "
                f"{settings.rollout.loop!r} must keep them. Or set top_p to 1 and top_k to none."
            )
    batch = _with_indices(Batch.from_trajectories(trajectories), ROUTED_EXPERTS, expert_shape(settings))
    batch = _with_indices(batch, NUCLEUS, None if width is None else (width,))
    if settings.metrics.log_rollouts:
        batch = batch.with_extras([rollout_extras(prompt, trajectory) for prompt, trajectory in pairs])
    if settings.distillation.texts is not None:  # texts have no reward
        batch = batch.only(batch.names - {"reward"})
    if needs_greedy(settings) and any(one.reward_baseline is None for one in trajectories):
        raise DataError(
            'algorithm.advantage = "remax" needs the reward of a greedy session for every prompt; a stored group has '
            "none. Generate it again: set rollout_cache.enabled = false, or another rollout_cache.directory."
        )
    if names := gdpo_components(settings):
        for trajectory in trajectories:
            if lacking := sorted(set(names) - trajectory.reward_components.keys()):
                raise DataError(
                    f"algorithm.weights names the component {lacking[0]!r}, but the reward function "
                    f"returned {sorted(trajectory.reward_components) or 'none'} for prompt {trajectory.prompt_uid}. It "
                    "must return every component for every response."
                )
        components = [{name: trajectory.reward_components[name] for name in names} for trajectory in trajectories]
        batch = with_reward_components(batch, components)
    queue.put_batch(batch)


def rollout_extras(prompt: Prompt, trajectory: Trajectory) -> dict[str, Json]:
    """A trajectory's extras plus the fields that rollouts.jsonl needs; they travel through the queue."""
    timings = trajectory.timings
    fields: dict[str, Json] = {
        "source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "components": dict(trajectory.reward_components),
        "finish": trajectory.finish_reason,
        "timings": {name: getattr(timings, name) for name in (*WORK, "preemptions")},
        "problem": problem_id(prompt.input_ids, images=prompt.images),
    }
    return {**trajectory.extras, **image_extras(trajectory.images), EXTRA: fields}


def problem_id(prompt_ids: IntArray, *, images: Sequence[ImageSpan] = ()) -> str:
    """Return an id of a prompt that depends only on tokens and images, so it is the same in every epoch and run."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes(), digest_size=8)
    for image in images:
        digest.update(bytes.fromhex(image.digest))
    return digest.hexdigest()


def _with_indices(batch: Batch, name: str, shape: tuple[int, ...] | None) -> Batch:
    """Column of indices if the learner needs it: -1 where unknown, such as experts in older cached steps."""
    if shape is None:
        return batch.only(batch.names - {name})
    if name in batch:
        return batch
    ids = batch.ragged("input_ids")
    unknown = np.full((len(ids.values), *shape), -1, column_spec(name).dtype)
    return batch.with_columns({name: Ragged(unknown, ids.offsets)})
