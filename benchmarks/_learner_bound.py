"""How many times as fast a step could be if what rows share were computed once, and sharing itself took no time.

Operations are weighted by their measured speed: a profiled step of the path that computes each row on its own says how
long products, head and attention take, and the rows say how much of each is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from _learner_workload import Rows

from rl_core.data import Batch
from rl_distill.prefixes import PrefixForest, batch_forest

_FIXED = ("_fused_adam", "Optimizer.step", "_foreach_", "aten::linalg_vector_norm", "aten::zero_", "AccumulateGrad")
"""Of optimizer and gradients, which are as many for one token as for all."""
_ATTENTION = ("bmm", "softmax", "scaled_dot_product", "attention", "attn", "flash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of a step: seconds, or what they grow with.

    Attributes:
        tokens: Products of the layers and all that is left, with the computed tokens.
        head: Products with the vocabulary, with the scored tokens.
        attention: With the pairs of tokens that meet.
        fixed: The optimizer, norms and zeroing of gradients, which no sharing makes less.
    """

    tokens: float
    head: float
    attention: float
    fixed: float = 0.0


def profiled_seconds(step: Callable[[], object], *, vocab_size: int) -> Parts:
    """Of one step: of the CPU, or of the kernels that a GPU ran for each operation.

    Raises:
        RuntimeError: There is a GPU, and the profiler saw none of its kernels.
    """
    has_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if has_gpu else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
    found = {"tokens": 0.0, "head": 0.0, "attention": 0.0, "fixed": 0.0}
    for event in profile.key_averages(group_by_input_shape=True):
        if event.device_type.name != "CPU":
            continue  # a kernel, which counts with the operation that started it
        kind = kind_of(event.key, event.input_shapes, vocab_size=vocab_size)
        found[kind] += (event.self_device_time_total if has_gpu else event.self_cpu_time_total) / 1e6
    if not any(found.values()):
        raise RuntimeError("the profiler saw no kernels (CUPTI is not allowed here)")
    return Parts(**found)


def kind_of(operation: str, shapes: Sequence[Sequence[int]], *, vocab_size: int) -> str:
    """The field of `Parts` that an operation on tensors of these shapes counts in."""
    # torch fills a large array where it is told to zero it: here the one buffer of all gradients.
    is_buffer = operation == "aten::fill_" and bool(shapes) and len(shapes[0]) == 1
    if is_buffer or any(name in operation for name in _FIXED):
        return "fixed"
    if any(name in operation for name in _ATTENTION):
        return "attention"
    return "head" if any(vocab_size in shape for shape in shapes) else "tokens"


def work(batch: Batch, rows: Rows, *, min_shared: int) -> Parts:
    """What is computed where rows share stretches from `min_shared` tokens on; 0 for nothing shared."""
    forest = batch_forest(batch, min_shared=min_shared)
    trained = np.flatnonzero(rows.loss_mask)
    scored = np.stack([forest.places[trained - 1], rows.input_ids[trained]])
    return Parts(tokens=forest.num_computed, head=np.unique(scored, axis=1).shape[1], attention=num_pairs(forest))


def num_pairs(forest: PrefixForest) -> float:
    """Pairs of a token with itself or one before it on its path."""
    lengths = np.diff(forest.offsets).astype(float)
    own = float((lengths * (lengths + 1)).sum()) / 2
    return own + float(sum((middle - start) * (stop - middle) for start, middle, stop in forest.spans))


def bound(seconds: Parts, *, unshared: Parts, shared: Parts) -> float:
    """Times as fast as the profiled step."""
    least = (
        seconds.fixed
        + seconds.tokens * shared.tokens / unshared.tokens
        + seconds.head * shared.head / unshared.head
        + seconds.attention * shared.attention / unshared.attention
    )
    return (seconds.fixed + seconds.tokens + seconds.head + seconds.attention) / least
