"""What `train --dry-run` says of teachers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from rl_core.cluster.shares import describe
from rl_distill.teacher.options import ESTIMATORS, DistillationOptions
from rl_trainer.settings import Settings
from rl_trainer.teachers import teacher_pool

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
INDENT = " " * 13


def describe_teachers(settings: Settings) -> Iterator[str]:
    """Each teacher with its place and what it answers for, and what is learnt from them."""
    chosen = settings.distillation
    if not chosen.is_on:
        return
    for name, teacher in chosen.teachers.items():
        places = {"process": ("a process", "processes"), "ray": ("an actor of Ray", "actors of Ray")}
        one, several = places[teacher.placement]
        where = f"1 replica in {one}" if teacher.replicas == 1 else f"{teacher.replicas} replicas in {several}"
        ranks = f" of {teacher.tensor} ranks" if teacher.tensor > 1 else ""
        pool = teacher_pool(settings, name)
        aside = "" if pool is None else f" with {describe(pool.cpus, pool.gpus)} each"
        yield f"  teacher    {name}: {teacher.engine}, {teacher.dtype}, {where}{ranks}{aside}"
        sources = [repr(source) for source in teacher.data_sources]
        parts = [f"{chosen.route_by} {', '.join(sources)}"] if sources else []
        parts += ["all others" if sources else "all prompts"] if name == chosen.default_teacher else []
        yield f"{INDENT}{teacher.model}, for {' and '.join(parts)}"
    yield f"  distils    {_compared(chosen)}, as a {chosen.used_as}; {_beside(chosen)}"
    if chosen.texts is not None:
        yield f"{INDENT}from the texts in column {chosen.texts!r}, in place of rollouts"
    if chosen.cache is not None:
        yield f"{INDENT}with scores stored in {chosen.cache}"


def teacher_memory(settings: Settings, count_parameters: Callable[[Path], int]) -> Iterator[str]:
    """What the weights of teachers take."""
    for name, teacher in settings.distillation.teachers.items():
        weights = count_parameters(teacher.model) * BYTES[teacher.dtype] / GIB
        cache = f" + {teacher.kv_cache_gib or 1:g} GiB KV cache (on a CPU)" if teacher.engine == "vllm" else ""
        yield f"  teacher    {name}: {teacher.replicas} x {weights:.2f} GiB weights{cache}"


def _compared(chosen: DistillationOptions) -> str:
    if chosen.loss in (*ESTIMATORS, "nll"):
        return f"{chosen.loss} of the sampled token" if chosen.teachers else f"{chosen.loss} of a teacher's texts"
    if chosen.needs_hidden:
        return f"{chosen.loss} of whole distributions"
    rest = {"bucket": "a bucket of the rest", "drop": "nothing of the rest", "renormalise": "these made to sum to 1"}
    return f"{chosen.loss} of the top {chosen.top_k} tokens and {rest[chosen.tail]}"


def _beside(chosen: DistillationOptions) -> str:
    return f"beside task rewards (coefficient {chosen.coefficient:g})" if chosen.use_task_rewards else "no task rewards"
