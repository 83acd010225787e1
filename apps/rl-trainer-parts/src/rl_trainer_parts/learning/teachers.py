"""Build the teacher service from the settings; each teacher runs in its own processes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rl_core.cluster import ClusterOptions, RayOptions, ResourcePool, visible_gpus
from rl_core.errors import SettingsError
from rl_distill.teacher import (
    ESTIMATORS,
    EngineReplica,
    MakeReplica,
    ReplicatedTeacher,
    ScoreCache,
    ScoreKind,
    SpanMode,
    TeacherAligner,
    TeacherOptions,
    TeacherPlan,
    TeacherReplica,
    TeacherRouter,
    TeacherService,
    TeacherServiceOptions,
    compare_vocabularies,
    model_fingerprint,
    model_traits,
    read_pieces,
)
from rl_rollout.engines import EnginePlacement, ProcessEngine, VLLMOptions, end_token_ids, max_positions
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.schema import Settings


def make_teachers(
    settings: Settings, *, log_directory: Path | None, say: Callable[..., None] | None = None
) -> TeacherService | None:
    """The teacher service, not started; None without teachers.

    Args:
        settings: The run's settings.
        log_directory: Where teachers write their output.
        say: Receives events.

    Raises:
        SettingsError: Routes, folders or tokenizers do not match.
    """
    chosen = settings.distillation
    if not chosen.teachers:
        return None
    caches = {} if chosen.cache is None else make_caches(settings, chosen.cache)
    teachers: list[ReplicatedTeacher] = []
    for name, teacher in chosen.teachers.items():
        plan = TeacherPlan(
            name=name,
            num_replicas=teacher.replicas,
            top_k=chosen.num_top,
            with_hidden=chosen.needs_hidden,
            restarts=teacher.restarts,
            dtype=teacher.dtype,
            sleeps=teacher.sleep,
            deadline_s=chosen.deadline_s,
            start_deadline_s=chosen.start_deadline_s,
        )
        make = replica_maker(settings, name, log_directory=log_directory)
        traits = model_traits(teacher.model) if caches else None
        teachers.append(ReplicatedTeacher(plan, make, traits=traits))
    return TeacherService(
        teachers,
        TeacherRouter(chosen),
        TeacherServiceOptions(
            vocab_size=model_config(settings.policy.path).vocab_size,
            top_k=chosen.num_top,
            with_hidden=chosen.needs_hidden,
            deadline_s=chosen.deadline_s,
        ),
        caches=caches,
        aligners=make_aligners(settings),
        say=say,
    )


def make_caches(settings: Settings, folder: Path) -> dict[str, ScoreCache]:
    """Cached scores of each teacher.

    Raises:
        CacheError: Its folder cannot be used.
        MissingExtraError: The cache needs a library that is not installed.
    """
    chosen = settings.distillation
    return {
        name: ScoreCache(
            folder,
            ScoreKind(
                teacher=model_fingerprint(teacher.model),
                dtype=teacher.dtype,
                top_k=chosen.num_top,
                temperature=chosen.temperature,
                with_hidden=chosen.needs_hidden,
            ),
        )
        for name, teacher in chosen.teachers.items()
    }


def replica_maker(settings: Settings, name: str, *, log_directory: Path | None) -> MakeReplica:
    """Factory of a teacher's replicas, called again after each death; every replica has its own log folder."""
    chosen, teacher = settings.distillation, settings.distillation.teachers[name]
    pool = teacher_pool(settings, name)

    def make(index: int) -> TeacherReplica:
        logs = None if log_directory is None else log_directory / "teachers" / f"{name}-{index}"
        ray = RayOptions(address=settings.cluster.ray_address)
        cluster = ClusterOptions(kind=teacher.placement, ray=ray, log_directory=logs)
        if teacher.engine == "vllm":
            options = teacher_engine_options(settings, name)
            host = EnginePlacement(cluster=cluster, pool=pool, deadline_s=chosen.start_deadline_s)
            return EngineReplica(ProcessEngine("vllm", teacher.model, options, host=host, index=index))
        from rl_distill.teacher.megatron_teacher import MegatronPlace, MegatronReplica  # imports torch

        place = MegatronPlace(
            tensor=teacher.tensor,
            cluster=cluster,
            pool=pool,
            dtype=teacher.dtype,
            max_batch_tokens=teacher.max_batch_tokens,
            max_tokens=longest_trajectory(settings, teacher),
            num_threads=teacher.num_threads,
            temperature=chosen.temperature,
            start_deadline_s=chosen.start_deadline_s,
            call_deadline_s=chosen.deadline_s,
        )
        return MegatronReplica(teacher.model, place)

    return make


def teacher_engine_options(settings: Settings, name: str) -> VLLMOptions:
    """Engine options of a teacher that vLLM serves."""
    chosen, teacher = settings.distillation, settings.distillation.teachers[name]
    return VLLMOptions(
        dtype=teacher.dtype,
        tensor_parallel_size=teacher.tensor,
        max_model_len=longest_trajectory(settings, teacher),
        max_num_batched_tokens=teacher.max_batch_tokens,
        kv_cache_gib=teacher.kv_cache_gib,
        gpu_memory_utilization=teacher.gpu_memory_utilization,
        can_sleep=teacher.sleep,
        max_top_k=max(chosen.num_top, 1),
        capture_experts=False,
        num_threads=teacher.num_threads,
    )


def longest_trajectory(settings: Settings, teacher: TeacherOptions) -> int:
    """Maximum trajectory length of a teacher: as set, or the maximum of prompt and response.

    A teacher with another tokenizer gets twice as many, if it has the positions.
    """
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    if teacher.max_model_len is not None or settings.distillation.other_tokenizer == "refuse":
        return teacher.max_model_len or longest
    return max(longest, min(2 * longest, max_positions(teacher.model)))


def teacher_pool(settings: Settings, name: str) -> ResourcePool | None:
    """Resources reserved for a teacher; None when it shares this machine's CPUs.

    Each rank gets the GPUs that are set, or one if this machine has GPUs. A slot belongs to a rank with Megatron, and
    to a replica with all its processes with vLLM.
    """
    teacher = settings.distillation.teachers[name]
    cpus, gpus = teacher.resources.cpus, teacher.resources.gpus
    gpus = float(bool(visible_gpus())) if gpus is None else gpus
    if not cpus and not gpus:
        return None
    if teacher.engine == "megatron":
        return ResourcePool(name=f"teacher {name}", size=teacher.replicas * teacher.tensor, cpus=cpus, gpus=gpus)
    ranks = teacher.tensor
    return ResourcePool(name=f"teacher {name}", size=teacher.replicas, cpus=cpus * ranks, gpus=gpus * ranks)


def make_aligners(settings: Settings) -> Mapping[str, TeacherAligner]:
    """For each teacher with another tokenizer, the aligner that maps its scores to the student's tokens.

    Raises:
        SettingsError: A tokenizer cannot be read, or has tokens without bytes.
    """
    chosen, student = settings.distillation, settings.policy.path
    if chosen.other_tokenizer == "refuse":
        return {}
    aligners = {}
    mode: SpanMode = "sampled" if chosen.loss in ESTIMATORS else "uld" if chosen.loss == "uld" else "top_k"
    for name, teacher in chosen.teachers.items():
        if compare_vocabularies(student, teacher.model).is_same:
            continue
        tokenizer = PromptTokenizer.load(teacher.model)
        aligners[name] = TeacherAligner(
            read_pieces(student, end_ids=_end_ids(student)),
            read_pieces(teacher.model, end_ids=_end_ids(teacher.model), begin_ids=_begin_ids(tokenizer)),
            partial(tokenizer.encode, add_special_tokens=False),
            mode=mode,
        )
    return aligners


def _end_ids(folder: Path) -> tuple[int, ...]:
    found = end_token_ids(folder)
    if not found:
        raise SettingsError(
            f"{folder} names no token that ends a response (eos_token_id in generation_config.json or config.json); "
            'other_tokenizer = "align" needs it.'
        )
    return found


def _begin_ids(tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Tokens that a tokenizer adds before every text."""
    (plain,), (whole,) = (tokenizer.encode(["a"], add_special_tokens=special) for special in (False, True))
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()
