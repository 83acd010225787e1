"""Maximum speed-up of a step if shared prefixes were computed once and sharing itself took no time.

Operations are weighted by their measured time: a profiled step that computes each row separately gives the seconds of
products, head and attention, and the rows determine how much of each remains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from _learner_workload import Rows

from rl_core.data import Batch
from rl_distill.prefixes import PrefixForest, batch_forest

_FIXED = ("_fused_adam", "Optimizer.step", "_foreach_", "aten::linalg_vector_norm", "aten::zero_", "AccumulateGrad")
"""Operations of optimizer and gradients, which do not depend on the number of tokens."""
_ATTENTION = ("bmm", "softmax", "scaled_dot_product", "attention", "attn", "flash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a step: seconds, or the quantity they are proportional to.

    Attributes:
        tokens: Products of the layers and everything else, proportional to computed tokens.
        head: Products with the vocabulary, proportional to scored tokens.
        attention: Attention, proportional to pairs of tokens.
        fixed: Optimizer, norms and zeroing of gradients, which sharing does not reduce.
    """

    tokens: float
    head: float
    attention: float
    fixed: float = 0.0


def profiled_seconds(step: Callable[[], object], *, vocab_size: int) -> Parts:
    """Profile one step: CPU time, or time of the GPU kernels of each operation.

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
            continue  # a kernel, counted with the operation that launched it
        kind = kind_of(event.key, event.input_shapes, vocab_size=vocab_size)
        found[kind] += (event.self_device_time_total if has_gpu else event.self_cpu_time_total) / 1e6
    if not any(found.values()):
        raise RuntimeError("the profiler saw no kernels (CUPTI is not allowed here)")
    return Parts(**found)


def kind_of(operation: str, shapes: Sequence[Sequence[int]], *, vocab_size: int) -> str:
    """Return the field of `Parts` for an operation on tensors of these shapes."""
    # torch zeroes a large array by filling it: here the one buffer of all gradients.
    is_buffer = operation == "aten::fill_" and bool(shapes) and len(shapes[0]) == 1
    if is_buffer or any(name in operation for name in _FIXED):
        return "fixed"
    if any(name in operation for name in _ATTENTION):
        return "attention"
    return "head" if any(vocab_size in shape for shape in shapes) else "tokens"


def work(batch: Batch, rows: Rows, *, min_shared: int) -> Parts:
    """Return what is computed if rows share prefixes of at least `min_shared` tokens; 0 shares nothing."""
    forest = batch_forest(batch, min_shared=min_shared)
    trained = np.flatnonzero(rows.loss_mask)
    scored = np.stack([forest.places[trained - 1], rows.input_ids[trained]])
    return Parts(tokens=forest.num_computed, head=np.unique(scored, axis=1).shape[1], attention=num_pairs(forest))


def num_pairs(forest: PrefixForest) -> float:
    """Return the number of pairs of a token with itself or an earlier one on its path."""
    lengths = np.diff(forest.offsets).astype(float)
    own = float((lengths * (lengths + 1)).sum()) / 2
    return own + float(sum((middle - start) * (stop - middle) for start, middle, stop in forest.spans))


def bound(seconds: Parts, *, unshared: Parts, shared: Parts) -> float:
    """Return the speed-up over the profiled step."""
    least = (
        seconds.fixed
        + seconds.tokens * shared.tokens / unshared.tokens
        + seconds.head * shared.head / unshared.head
        + seconds.attention * shared.attention / unshared.attention
    )
    return (seconds.fixed + seconds.tokens + seconds.head + seconds.attention) / least
