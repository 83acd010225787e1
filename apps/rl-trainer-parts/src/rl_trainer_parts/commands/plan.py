"""The output of `train --dry-run`: roles, batch arithmetic, memory and files."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from rl_core.cluster import count_room, describe_shares, machine_shares
from rl_core.terminal_text import counted
from rl_distill import (
    ALGORITHMS,
    LoraOptions,
    PolicyConfig,
    adapted_modules,
    adapter_size,
    count_parameters,
    rank_memory,
    step_memory,
)
from rl_distill.teacher import ESTIMATORS, DistillationOptions
from rl_rollout.engines import end_token_ids
from rl_trainer_parts.learning.engine_choice import engine_choice, engine_name
from rl_trainer_parts.learning.mixtures import (
    expert_shape,
    learner_name,
    model_config,
    routes_anew,
    why_not_replayed,
)
from rl_trainer_parts.learning.objective import clip_range, has_policy_gradient, learns_from_rewards, needs_greedy
from rl_trainer_parts.learning.start_learners import gpus_per_rank, needs_critic, needs_reference
from rl_trainer_parts.learning.teachers import teacher_pool
from rl_trainer_parts.machine.needs import BYTES, GIB
from rl_trainer_parts.rollouts.engines import longest_trajectory, replica_pool
from rl_trainer_parts.rollouts.inputs import Inputs, shows_images
from rl_trainer_parts.rollouts.setup import proof_tolerances
from rl_trainer_parts.settings.algorithm_choice import changes_of_paper, options_of
from rl_trainer_parts.settings.fields import written
from rl_trainer_parts.settings.schema import Settings, TrainerSettings

EXPERT_BYTES, ID_BYTES = 2, 4
MIB = 2**20
FULL_TRAINING_RATE = 1e-5
"""Learning rates for full RL training are rarely above this."""

INDENT = " " * 13
PLACES = {"process": ("a process", "processes"), "ray": ("a Ray actor", "Ray actors")}


def describe_plan(
    settings: Settings,
    inputs: Inputs,
    loop_lines: Sequence[str] = (),
    *,
    inline_engine: str = "in the learner's process",
    inline_rank: str = "in this process",
) -> str:
    """The plan as lines of text.

    Args:
        settings: The run's settings.
        inputs: Its prompts.
        loop_lines: Lines that describe the agent loop.
        inline_engine: Where an inline engine runs.
        inline_rank: Where a single inline rank runs.
    """
    lines = chain(
        _roles(settings, loop_lines, inline_engine, inline_rank),
        _adapter(settings, model_config(settings.policy.path, settings.policy.backend)) if settings.lora.rank else (),
        _objective(settings),
        _arithmetic(settings, inputs),
        _memory(settings),
        _files(settings),
    )
    return "\n".join(lines)


def describe_learner(settings: Settings, lines: Sequence[str]) -> str:
    """The plan of a run without rollouts: the learner and its adapter, after lines about its data."""
    config, optimizer = model_config(settings.policy.path, settings.policy.backend), settings.optimizer
    warm_up = f"warm-up of {counted(optimizer.warmup_steps, 'step')}"
    more = [
        f"  optimizer  {optimizer.algorithm}, learning rate {optimizer.learning_rate:g}, {warm_up}",
        f"  memory     {_on_ranks(settings, config, 'policy')} (weights, gradients, optimizer), without activations",
    ]
    adapter = _adapter(settings, config) if settings.lora.rank else ()
    return "\n".join((*lines, *_learner(settings, "in this process"), *more, *adapter))


def _roles(settings: Settings, loop_lines: Sequence[str], inline_engine: str, inline_rank: str) -> Iterator[str]:
    rollout = settings.rollout
    where = inline_engine if rollout.placement == "inline" else _engine_place(settings)
    yield "Roles"
    yield from _learner(settings, inline_rank)
    engine = engine_choice(settings)
    yield f"  engine     {engine.name}, {settings.vllm.dtype}, {where}; loop {rollout.loop}"
    if engine.reason:
        yield f"{INDENT}rollout.engine = auto: {engine.reason}"
    yield from (f"{INDENT}{line}" for line in loop_lines)
    yield from _replay(settings)
    yield f"{INDENT}responses end at token {' or '.join(map(str, end_token_ids(settings.policy.path))) or 'none'}"
    yield f"  reward     {settings.reward.label}"
    if settings.algorithm.kl_coefficient:
        frozen = "the policy without its adapter" if settings.lora.rank else "frozen copy of the policy"
        yield f"  reference  {frozen} (KL coefficient {settings.algorithm.kl_coefficient:g})"
    if needs_critic(settings):
        start = settings.critic.path or "the policy's layers with a value head of zeros"
        yield f"  critic     {start}; learning rate {settings.critic.learning_rate:g}"
    yield from _teachers(settings)


def _learner(settings: Settings, inline_rank: str) -> Iterator[str]:
    """Lines about the learner's back end, policy and ranks."""
    yield f"  learner    {learner_name(settings)}, {settings.optimizer.dtype}, policy {settings.policy.path}"
    config = model_config(settings.policy.path, settings.policy.backend)
    if config.model_json:
        held = "divided over the ranks" if settings.parallel.shard_weights else "whole on each rank"
        yield f"{INDENT}{config.architecture} is computed by transformers' class, {held}"
    yield from _ranks(settings, inline_rank)


def _replay(settings: Settings) -> Iterator[str]:
    """Lines about a mixture of experts: whether the learner replays the engine's routing."""
    if expert_shape(settings) is not None:
        yield f"{INDENT}records each token's experts, which the learner replays"
    elif routes_anew(settings):
        yield f"{INDENT}a mixture without replay: some tokens train other experts than the engine used, because"
        yield f"{INDENT}{why_not_replayed(settings)}"
        if math.isinf((tolerances := proof_tolerances(settings)).canary):
            yield f"{INDENT}so only the mean of the canary's differences is compared: {tolerances.mean_canary:g} nats"


def _engine_place(settings: Settings) -> str:
    count, (one, several) = settings.replicas.count, PLACES[settings.rollout.placement]
    where = f"in {count} {several}" if count > 1 else f"in {one} of its own"
    pool = replica_pool(settings)
    return where if pool is None else f"{where} with {describe_shares(pool.cpus, pool.gpus)} each"


def _ranks(settings: Settings, inline_rank: str) -> Iterator[str]:
    parallel, cluster = settings.parallel, settings.cluster
    if cluster.placement == "inline":
        yield f"{INDENT}one rank, {inline_rank}"
        return
    where = PLACES[cluster.placement][parallel.ranks > 1]
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context", "data", "expert")}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no parallelism"
    yield f"{INDENT}{counted(parallel.ranks, 'rank')} in {where}: {layout}"
    cpus, gpus, ranks = cluster.cpus_per_rank, gpus_per_rank(settings), parallel.ranks
    if cpus or gpus:
        yield f"{INDENT}reserved for each: {describe_shares(cpus, gpus)}"
    if (cpus or gpus) and cluster.ray_address is None:  # only Ray knows the resources of a joined cluster
        machine = machine_shares()
        room = count_room(machine, cpus, gpus, at_most=ranks)
        verdict = "" if room == ranks else f", room for {room} of {ranks} ranks, so a run here would be refused"
        yield f"{INDENT}this machine has {describe_shares(machine.cpus, len(machine.gpus))}{verdict}"


def _teachers(settings: Settings) -> Iterator[str]:
    """Each teacher with its placement and routes, and how the policy learns from it."""
    chosen = settings.distillation
    if not chosen.is_on:
        return
    for name, teacher in chosen.teachers.items():
        one, several = PLACES[teacher.placement]
        where = f"1 replica in {one}" if teacher.replicas == 1 else f"{teacher.replicas} replicas in {several}"
        ranks = f" of {teacher.tensor} ranks" if teacher.tensor > 1 else ""
        pool = teacher_pool(settings, name)
        aside = "" if pool is None else f" with {describe_shares(pool.cpus, pool.gpus)} each"
        yield f"  teacher    {name}: {teacher.engine}, {teacher.dtype}, {where}{ranks}{aside}"
        sources = [repr(source) for source in teacher.data_sources]
        parts = [f"{chosen.route_by} {', '.join(sources)}"] if sources else []
        parts += ["all others" if sources else "all prompts"] if name == chosen.fallback else []
        yield f"{INDENT}{teacher.model}, for {' and '.join(parts)}"
    if (own := chosen.self_teacher).model is not None:
        kept = f" (decay {own.average_decay:g})" if own.model == "average" else ""
        prompts = ", or ".join(map(repr, own.prompts)) or "the policy's prompts"
        yield f"  teacher    the learner's {own.model}{kept}, under {prompts}"
    rewards = f"beside task rewards (coefficient {chosen.coefficient:g})" if chosen.use_task_rewards else ""
    yield f"  distils    {_compared(chosen)}, as a {chosen.used_as}; {rewards or 'no task rewards'}"
    if chosen.texts is not None:
        yield f"{INDENT}from the texts in column {chosen.texts!r}, in place of rollouts"
    if chosen.cache is not None:
        yield f"{INDENT}with scores stored in {chosen.cache}"


def _compared(chosen: DistillationOptions) -> str:
    if chosen.loss in (*ESTIMATORS, "nll"):
        return f"{chosen.loss} of the sampled token" if chosen.has_teacher else f"{chosen.loss} of a teacher's texts"
    if chosen.needs_hidden:
        return f"{chosen.loss} of whole distributions"
    rest = {"bucket": "with a bucket for the rest", "drop": "without the rest", "renormalise": "renormalised"}
    return f"{chosen.loss} of the top {counted(chosen.top_k, 'token')}, {rest[chosen.tail]}"


def _adapter(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Lines about an adapter: trained parameters, size of an update, learning rate."""
    lora, rate = settings.lora, settings.optimizer.learning_rate
    targets, total = adapted_modules(config, lora), count_parameters(config).total
    trained, size = adapter_size(config, lora), BYTES[settings.optimizer.dtype]
    modules = dict.fromkeys(name.rpartition(".")[2] for name in targets)
    matrices = counted(len(targets), "matrix", "matrices")
    yield "Adapter"
    yield f"  trains     {trained:,} of {total:,} parameters ({trained / total:.2%}); the others are frozen"
    yield f"{INDENT}rank {lora.rank}, B @ A scaled by {lora.scaling:g}, on {matrices}:"
    yield f"{INDENT}{', '.join(modules)}"
    yield f"{INDENT}starts from {lora.path or 'an adapter without effect'}"
    if lora.serving == "adapter" and "lora.serving" not in settings.left_out:
        yield f"  an update  {size_text(trained * size)}, served beside the base model (lora.serving = adapter)"
    elif "lora.serving" not in settings.left_out:
        yield f"  an update  {size_text(total * size)}, all weights with the adapter merged (lora.serving = merged)"
    if rate > FULL_TRAINING_RATE:
        yield f"  rate       {rate:g}; LoRA usually needs ten times the learning rate of full training"
    else:
        yield f"  rate       optimizer.learning_rate = {rate:g} looks like a rate for full training;"
        yield f"{INDENT}LoRA usually needs ten times as much, {10 * rate:g}"


def _objective(settings: Settings) -> Iterator[str]:
    """Lines about advantage, policy loss, clip range, aggregation, KL and correction."""
    algorithm, correction = settings.algorithm, settings.correction
    yield "Objective"
    if algorithm.name is not None:
        yield f"  algorithm  {ALGORITHMS.get(algorithm.name).title}, {ALGORITHMS.get(algorithm.name).source}"
        for name, (value, of_paper) in changes_of_paper(settings).items():
            yield f"{INDENT}with {name} = {written(value) or 'none'}; the paper's is {written(of_paper) or 'none'}"
    if has_policy_gradient(settings):
        source = f"advantage {algorithm.advantage}" if learns_from_rewards(settings) else "advantages from the teachers"
        low, high = ("none" if bound is None else f"{bound:g}" for bound in clip_range(settings))
        clip = "" if low == high == "none" else f", clip {low} below and {high} above"
        yield f"  policy     {source}; loss {algorithm.policy_loss}{clip}"
        scored = "engine" if algorithm.old_logprobs == "rollout" else "learner before the update"
        yield f"{INDENT}against the logprobs of the {scored}"
        options = {**options_of(algorithm, "advantage"), **options_of(algorithm, "policy_loss")}
        if options:
            yield f"{INDENT}options {', '.join(f'{name} = {written(value)}' for name, value in options.items())}"
    without = ", without sessions that a limit ended" if settings.rollout.mask_truncated else ""
    yield f"  average    {algorithm.aggregation}{without}"
    if algorithm.kl_coefficient:
        target = "" if algorithm.kl_target is None else f", adapted to {algorithm.kl_target:g} nats a token"
        kind = f"{algorithm.kl_estimator} in the {algorithm.kl_in}"
        yield f"  KL         {kind}, coefficient {algorithm.kl_coefficient:g}{target}"
    else:
        yield "  KL         none"
    if algorithm.entropy_coefficient:
        yield f"  entropy    bonus with coefficient {algorithm.entropy_coefficient:g}"
    if correction.weights != "none":
        yield f"  correction weights per {correction.weights}, at most {correction.cap:g}"
    if correction.reject:
        yield f"  rejection  by {', '.join(correction.reject)}"


def _arithmetic(settings: Settings, inputs: Inputs) -> Iterator[str]:
    rollout, trainer = settings.rollout, settings.trainer
    samples = rollout.prompts_per_step * rollout.group_size
    longest, bound = longest_trajectory(settings), settings.prompts.max_tokens + rollout.max_response_tokens
    epochs = trainer.steps * rollout.prompts_per_step / len(inputs.train)
    micro_batches = min(samples, -(-samples * longest // settings.optimizer.micro_batch_tokens))
    yield "Batches"
    prompts, sessions = counted(rollout.prompts_per_step, "prompt"), counted(rollout.group_size, "session")
    yield f"  a step     {prompts} x {sessions} = {counted(samples, 'trajectory', 'trajectories')}"
    if needs_greedy(settings):
        yield f"{INDENT}and a greedy session for each prompt, whose reward is the baseline; it does not train"
    if settings.dynamic_sampling.filter:
        sampling = settings.dynamic_sampling
        rounds = counted(sampling.max_rounds, "round")
        yield f"{INDENT}from groups that {sampling.filter} keeps, in at most {rounds} of generation"
    if settings.rollout_cache.enabled:
        cache = settings.rollout_cache
        yield f"{INDENT}steps {cache.steps} from the rollout cache {cache.directory} (action {cache.action})"
    updates = counted(trainer.minibatches * trainer.epochs, "optimizer update")
    yield f"{INDENT}in {updates}, at most {counted(micro_batches, 'micro-batch', 'micro-batches')} in total"
    made_of = f"{settings.prompts.max_tokens} + {rollout.max_response_tokens} = " if longest == bound else ""
    yield f"  tokens     at most {made_of}{longest} a trajectory"
    yield from _sharing(settings)
    if longest > settings.optimizer.micro_batch_tokens:
        yield f"{INDENT}one longer than optimizer.micro_batch_tokens = {settings.optimizer.micro_batch_tokens}"
        yield "             becomes a micro-batch of its own"
    trajectories = counted(trainer.steps * samples, "trajectory", "trajectories")
    yield f"  the run    {counted(trainer.steps, 'step')}, {trajectories}, {epochs:.2f} epochs"
    yield f"  problems   {len(inputs.train)} to train on, {len(inputs.test or ())} to test at the start and the end,"
    yield f"{INDENT}{len(inputs.validation or ())} for validation {_every(trainer.validate_every)}"
    yield from _ending(trainer)
    if settings.prompts.validation_samples > 1:
        yield f"{INDENT}{settings.prompts.validation_samples} responses to each of these"
    if shows_images(settings, inputs):
        shown = (
            f"{counted(inputs.num_images, 'image')} in the prompts" if inputs.num_images else "those that turns return"
        )
        yield f"  images     {shown}, kept in {settings.run_folder}/images"
    form = "messages, formatted by the chat template" if inputs.train[0].messages else "plain text, unchanged"
    yield f"  prompts    {form}; the longest has {inputs.train.longest} tokens"
    if dropped := sum(one.num_dropped for one in (inputs.train, inputs.validation, inputs.test) if one is not None):
        yield f"{INDENT}{counted(dropped, 'row')} longer than prompts.max_tokens left out"


def _every(steps: int) -> str:
    """How often something happens, as text; 0 is only at the end."""
    return ("only at the end", "every step")[steps] if steps < 2 else f"every {steps} steps"


def _sharing(settings: Settings) -> Iterator[str]:
    """Line about prompts that the learner computes once per group."""
    least, rollout = settings.optimizer.shared_prefix_tokens, settings.rollout
    if least == 0 or rollout.group_size == 1:
        return
    prompt, longest = settings.prompts.max_tokens, longest_trajectory(settings)
    share = (rollout.group_size - 1) * prompt / (rollout.group_size * longest)
    yield f"{INDENT}a group's prompt of {least} or more tokens is computed once, which saves up to {share:.0%}"


def _memory(settings: Settings) -> Iterator[str]:
    policy, rollout = model_config(settings.policy.path, settings.policy.backend), settings.rollout
    engine = count_parameters(policy).total * BYTES[settings.vllm.dtype]
    yield f"Memory, without activations, for {_parameters(policy)}"
    yield f"  learner    {_on_ranks(settings, policy, 'policy')} (weights, gradients, optimizer)"
    yield from _division(settings, policy)
    yield from _activations(settings, policy)
    if needs_critic(settings):
        critic = model_config(settings.critic.path or settings.policy.path, settings.policy.backend)
        yield f"  critic     {_on_ranks(settings, critic, 'critic')}, like the learner, for {_parameters(critic)}"
    if needs_reference(settings):
        shared = "none: it shares the learner's" if settings.lora.rank else _on_ranks(settings, policy, "frozen")
        yield f"  reference  {shared} (weights)"
    if settings.distillation.self_teacher.model == "average":
        trained = adapter_size(policy, settings.lora) if settings.lora.rank else count_parameters(policy).total
        yield f"  average    {size_text(4 * trained)} in float32 over all ranks, beside the optimizer's state"
    for name, teacher in settings.distillation.teachers.items():
        config = model_config(teacher.model)
        weights = size_text(count_parameters(config).total * BYTES[teacher.dtype])
        cache = f" + {teacher.kv_cache_gib or 1:g} GiB KV cache (on a CPU)" if teacher.engine == "vllm" else ""
        yield f"  teacher    {name}: {teacher.replicas} x {weights} weights{cache}, for {_parameters(config)}"
    cache = f" + {settings.vllm.kv_cache_gib or 1:g} GiB KV cache (on a CPU)"
    yield f"  engine     {size_text(engine)} weights{cache if engine_name(settings) == 'vllm' else ''}"
    tokens = rollout.prompts_per_step * rollout.group_size * longest_trajectory(settings)
    if width := rollout.nucleus_width:
        token = ID_BYTES * width
        yield f"  nuclei     {token} bytes a token, in trajectories: at most {size_text(tokens * token)} a step"
    if shape := expert_shape(settings):
        token = EXPERT_BYTES * math.prod(shape)
        step = tokens * token
        yield f"  experts    {token} bytes a token, in the engine and in trajectories: at most {size_text(step)} a step"


def _parameters(config: PolicyConfig) -> str:
    """Number of parameters; for a mixture also the active ones."""
    total, active, _ = count_parameters(config)
    return f"{total:,} parameters{'' if active == total else f', {active:,} of them active'}"


def _on_ranks(settings: Settings, config: PolicyConfig, kind: Literal["policy", "critic", "frozen"]) -> str:
    """Memory of a model on the rank that needs the most."""
    parallel = settings.parallel
    lora = settings.lora if kind == "policy" else LoraOptions()
    chosen = settings.optimizer
    stages = rank_memory(config, parallel, dtype=chosen.dtype, kind=kind, algorithm=chosen.algorithm, lora=lora)
    which = "each" if len(set(stages)) == 1 else "the fullest"
    where = f" on {which} of {parallel.ranks} ranks" if parallel.ranks > 1 else ""
    return f"{size_text(max(map(sum, stages)))}{where}"


def _division(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Lines about what each rank holds of a model that transformers' class computes, unless FSDP divides it."""
    if not config.model_json or settings.parallel.shard_weights:
        return
    parallel, dtype = settings.parallel, settings.optimizer.dtype
    layouts = (parallel, replace(parallel, distributed_optimizer=True))
    (now,), (divided,) = (rank_memory(config, layout, dtype=dtype, lora=settings.lora) for layout in layouts)
    whole = f"{size_text(now.weights)} of weights and {size_text(now.gradients)} of gradients"
    yield f"{INDENT}whole on each rank: {whole}"
    if parallel.ranks > 1 and not parallel.distributed_optimizer:
        smaller = f"{size_text(sum(divided))} on each rank"
        yield f"{INDENT}parallel.distributed_optimizer = true would divide the rest, to {smaller}"


def _activations(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Additional activation memory of the layers on a GPU; with other kernels and dtypes it depends on the lengths."""
    learner = settings.optimizer
    is_known = learner.kernels != "plain" and learner.dtype == "bfloat16"
    if is_known and not settings.lora.rank and not config.model_json:
        needed = max(step_memory(config, settings.parallel, learner))
        yield f"{INDENT}and {size_text(needed)} for a step on a GPU with full micro-batches"


def _ending(trainer: TrainerSettings) -> Iterator[str]:
    """Lines on the target, and on what ends the run before its last step."""
    target = trainer.target
    if target.value is not None:
        sign = "<=" if target.lower_is_better else ">="
        ends = ", which ends the run" if target.stop else ""
        yield f"  target     {target.label} {sign} {target.value:g}{ends}"
    if trainer.stop_when_no_better is not None:
        yield f"  patience   ends after {counted(trainer.stop_when_no_better, 'validation')} without a new best"


def _files(settings: Settings) -> Iterator[str]:
    folder = settings.run_folder
    every = settings.trainer.checkpoint_every
    when = f"{_every(every)} and at the end" if every else "at the end"
    yield f"Writes to {folder}/"
    yield "  settings.toml metrics.jsonl histograms.jsonl generations.jsonl rollouts.jsonl probes.jsonl events.jsonl"
    yield "  health.json report.html summary.json"
    has_best = settings.trainer.keep_best and settings.prompts.validation is not None
    best = " and the best validated one" if has_best else ""
    yield f"  checkpoints/step_N {when}, the newest {settings.trainer.keep_checkpoints}{best} kept"


def size_text(size_bytes: float) -> str:
    """A size in GiB, or in MiB below 1 GiB, such as "3.50 MiB"."""
    return f"{size_bytes / MIB:.2f} MiB" if size_bytes < GIB else f"{size_bytes / GIB:.2f} GiB"
