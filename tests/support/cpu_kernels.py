"""Flash attention kernels for a CPU, so that tests on a CPU cover the code paths of a GPU.

The kernels are simple: they process one sequence after another in float32 or wider, with the semantics of
FlashAttention 2. A causal mask is aligned to the last query and the last key. A query without visible keys returns 0
and a log-sum-exp of infinity. The backward pass uses the output and log-sum-exp that it receives.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Stretch = tuple[slice, slice, Tensor]
"""Query slice, key slice, and scores [groups, heads of a group, queries, keys], -inf at masked keys."""


def install_cpu_kernels() -> None:
    """Enable `kernels="fused"` on a CPU for learners in this process. Can be called again."""
    from torch.nn.attention import varlen  # loads torch's compiler

    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)


def install_uncompiled_kernels() -> None:
    """Do the same, and run the fused passes uncompiled in this process from now on, which saves half a minute."""
    install_cpu_kernels()
    torch.compiler.set_stance("force_eager")


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """Return [L, heads, D] as [groups, heads of a group, L, D] in float32 or wider."""
    return torch.unflatten(x.to(_wide(x.dtype)).transpose(0, 1), 0, (num_groups, -1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _stretches(
    query: Tensor, key: Tensor, starts: tuple[Tensor, Tensor], *, is_causal: bool, scale: float
) -> Iterator[Stretch]:
    (query_starts, key_starts), num_groups = (column.tolist() for column in starts), key.shape[1]
    for number in range(len(query_starts) - 1):
        queries = slice(*query_starts[number : number + 2])
        keys = slice(*key_starts[number : number + 2])
        scores = _by_group(query[queries], num_groups) @ _by_group(key[keys], num_groups).transpose(-1, -2) * scale
        if is_causal:
            num_queries, num_keys = scores.shape[-2:]
            hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(1 + num_keys - num_queries)
            scores = scores.masked_fill(hidden, -math.inf)
        yield queries, keys, scores


def _is_causal(window: Sequence[int] | None, *, is_causal: bool) -> bool:
    """Return whether the mask is causal; FlashAttention treats a window without later keys as causal."""
    left, right = window or (-1, -1)
    if left != -1 or right not in (-1, 0):
        raise NotImplementedError(f"window_size must be [-1, -1] or [-1, 0] on a CPU; found {[left, right]}.")
    return is_causal or right == 0


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [T, heads, D], log-sum-exps [heads, T], and an empty random state."""
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=_wide(query.dtype))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    is_causal = _is_causal(window_size, is_causal=is_causal)
    for queries, keys, scores in _stretches(query, key, (cu_seq_q, cu_seq_k), is_causal=is_causal, scale=scale):
        of_stretch = scores.logsumexp(-1).masked_fill_((scores == -math.inf).all(-1), math.inf)
        found = (scores - of_stretch.unsqueeze(-1)).exp() @ _by_group(value[keys], key.shape[1])
        lse[:, queries], out[queries] = of_stretch.flatten(0, 1), found.flatten(0, 1).transpose(0, 1).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries [T, heads, D], keys and values [T, groups, D]."""
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (query, key, value))
    num_groups, scale = key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    is_causal = _is_causal(window_size, is_causal=is_causal)
    for queries, keys, scores in _stretches(query, key, (cu_seq_q, cu_seq_k), is_causal=is_causal, scale=scale):
        q, o, grad = (_by_group(x[queries], num_groups) for x in (query, out, grad_out))
        k, v = (_by_group(x[keys], num_groups) for x in (key, value))
        p = (scores - torch.unflatten(lse[:, queries], 0, (num_groups, -1)).unsqueeze(-1)).exp()
        of_scores = p * (grad @ v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True)) * scale
        grad_q[queries] = (of_scores @ k).flatten(0, 1).transpose(0, 1).to(grad_q.dtype)
        for whole, found in ((grad_k, of_scores.transpose(-1, -2) @ q), (grad_v, p.transpose(-1, -2) @ grad)):
            whole[keys] = found.sum(1).transpose(0, 1).to(whole.dtype)
    return grad_q, grad_k, grad_v
