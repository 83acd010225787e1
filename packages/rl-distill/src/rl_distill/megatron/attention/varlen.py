"""Attention over a pack by flash kernels for sequences of variable length laid end to end.

A pack needs 1 + depth calls, however many segments it has: one for all segments with themselves, and one per level of
the forest, in which all continuations of the level's segments attend to them. A token's outputs are merged by their
log-sum-exps, and the backward pass of each call is the standard one, as in `prefixes`.

The kernels are those of `torch.nn.attention.varlen`, for GPUs. The private operators are used because the public
function has no gradient for a merged log-sum-exp. torch 2.11 to 2.13 have them with the arguments used here.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import attention

from rl_core.data import offsets_of, token_positions

_log = structlog.get_logger(__name__)

_LARGEST_HEAD = 256
"""Maximum channels per head that the kernels support, in multiples of 8."""

_NEWER_KERNELS = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""Optional kernels that may be faster than torch's, by major compute capability, in order of preference."""

_ROUNDING = 3e-2
"""Maximum difference between kernels for 16-bit values near 1."""

_refused: set[str] = set()
"""Optional kernels that failed in this process; kernels are selected per process, not per model."""

Span = tuple[int, int, int]
"""First token of a segment with continuations, first token of the continuations, and their end."""


@dataclass(frozen=True, slots=True)
class FlashCall:
    """One call of the kernel: the queries of each slice attend to the keys of the slice with the same index.

    Attributes:
        queries: Tokens of the query slices, end to end: a slice of the pack, or [N] int64 indices.
        keys: Tokens of the key slices, in the same form.
        query_starts: [slices + 1] int32 offsets of the slices among the queries.
        key_starts: [slices + 1] int32 offsets of the slices among the keys.
        longest: Maximum number of tokens in a query slice and in a key slice.
        is_causal: True if a query attends only to keys up to its own position; queries and keys are then the same
            slices.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]
    is_causal: bool

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.query_starts, self.key_starts, *self.longest, self.is_causal

    @property
    def _window(self) -> list[int]:
        """Number of keys before and after its own that a query attends to; -1 for all."""
        return [-1, 0 if self.is_causal else -1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs [N, heads, D], float32 log-sum-exps [heads, N], and the state that the backward pass needs."""
        out, lse, state = _operators()._varlen_attn(
            q[self.queries], k[self.keys], v[self.keys], *self._arguments, scale=scale, window_size=self._window
        )
        return out, lse, state

    def gradients(
        self, grad: Tensor, qkv: Sequence[Tensor], merged: tuple[Tensor, Tensor, Tensor], *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of this block's queries, keys and values from that of the merged output.

        Args:
            grad: [T, heads, D] gradient of the merged output.
            qkv: Queries, keys and values of all tokens.
            merged: Output [T, heads, D] and log-sum-exp [heads, T] over all blocks, and the state from the forward
                pass.
            scale: Factor on the scores.
        """
        (q, k, v), (out, lse, state) = qkv, merged
        found: tuple[Tensor, Tensor, Tensor] = _operators()._varlen_attn_backward(
            grad[self.queries],
            q[self.queries],
            k[self.keys],
            v[self.keys],
            out[self.queries],
            lse[:, self.queries].contiguous(),
            *self._arguments,
            rng_state=state,
            scale=scale,
            window_size=self._window,
        )
        return found


def plan_blocks(offsets: NDArray[np.int64], spans: Sequence[Span], *, device: torch.device) -> tuple[FlashCall, ...]:
    """Return the calls of a pack: all segments with themselves, then each level of the forest.

    Args:
        offsets: [S + 1] int64 offsets of the segments, each of at least one token.
        spans: Spans of the forest of segments, in order.
        device: Device of the index tensors.
    """
    tokens, starts, longest = _stretches(offsets[:-1], offsets[1:], device)
    blocks = [FlashCall(tokens, tokens, starts, starts, (longest, longest), is_causal=True)]
    for level in _levels(spans):
        first, middle, end = np.array(level, dtype=np.int64).T
        queries, query_starts, most_queries = _stretches(middle, end, device)
        keys, key_starts, most_keys = _stretches(first, middle, device)
        blocks.append(FlashCall(queries, keys, query_starts, key_starts, (most_queries, most_keys), is_causal=False))
    return tuple(blocks)


def _levels(spans: Sequence[Span]) -> list[list[Span]]:
    """Group the spans by depth, which is the number of spans that contain them."""
    levels: list[list[Span]] = []
    ends: list[int] = []
    for span in spans:
        while ends and ends[-1] <= span[0]:
            ends.pop()
        if len(ends) == len(levels):
            levels.append([])
        levels[len(ends)].append(span)
        ends.append(span[2])
    return levels


def _stretches(
    first: NDArray[np.int64], end: NDArray[np.int64], device: torch.device
) -> tuple[slice | Tensor, Tensor, int]:
    """Return the tokens of slices, their offsets, and the maximum length."""
    lengths = end - first
    starts = torch.from_numpy(offsets_of(lengths).astype(np.int32)).to(device)
    longest = int(lengths.max())
    if np.array_equal(first[1:], end[:-1]):
        return slice(int(first[0]), int(end[-1])), starts, longest
    return torch.from_numpy(token_positions(first, lengths)).to(device), starts, longest


class _VarlenAttention(torch.autograd.Function):
    """Autograd function of `varlen_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[FlashCall, ...], scale: float) -> Tensor:
        out, lse, state = blocks[0].attend(q, k, v, scale=scale)
        parts = [(block.queries, *block.attend(q, k, v, scale=scale)[:2]) for block in blocks[1:]]
        if parts:
            out, lse = _merge(out, lse, parts)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *merged = ctx.saved_tensors
        grad = grads[0].contiguous()
        sums: tuple[Tensor, ...] = ()
        for block in ctx.blocks:
            parts = block.gradients(grad, (q, k, v), merged, scale=ctx.scale)
            if not sums:
                sums = parts if len(ctx.blocks) == 1 else tuple(part.to(merged[1].dtype) for part in parts)
                continue
            for whole, part, tokens in zip(sums, parts, (block.queries, block.keys, block.keys), strict=True):
                whole[tokens] += part
        return *(whole.to(x.dtype) for whole, x in zip(sums, (q, k, v), strict=True)), None, None


def _merge(
    own: Tensor, own_lse: Tensor, parts: Sequence[tuple[slice | Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Merge the output and log-sum-exp of the first block with those of others, which cover some of the tokens."""
    total = own_lse.clone()
    for tokens, _, lse in parts:
        total[:, tokens] = torch.logaddexp(total[:, tokens], lse)
    out = own.to(total.dtype) * _share(own_lse, total)
    for tokens, part, lse in parts:
        out[tokens] += part * _share(lse, total[:, tokens])
    return out.to(own.dtype), total


def _share(lse: Tensor, total: Tensor) -> Tensor:
    """Return the share [N, heads, 1] of a query's attention, from log-sum-exps [heads, N]."""
    return (lse - total).exp().t().unsqueeze(-1)


def varlen_attention(qkv: Sequence[Tensor], blocks: tuple[FlashCall, ...], *, scale: float) -> Tensor:
    """Compute attention of each token to the tokens before it on its path through the forest.

    Args:
        qkv: Queries [T, heads, D], keys and values [T, groups, D], after the rotary embedding.
        blocks: Result of `plan_blocks`.
        scale: Factor on the scores.

    Returns:
        [T, heads, D].
    """
    return _VarlenAttention.apply(*qkv, blocks, scale)  # type: ignore[no-any-return, no-untyped-call]


@functools.cache
def _operators() -> Any:
    """Return the flash operators. Importing them also loads torch's compiler, which a learner on a CPU does not use."""
    importlib.import_module("torch.nn.attention.varlen")
    return torch.ops.torch_attn


def has_cpu_kernels() -> bool:
    """Return whether flash kernels for a CPU are registered; torch itself has none."""
    _operators()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("torch_attn::_varlen_attn", "CPU"))


def has_gpu_kernels(device: torch.device, *, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's flash kernels support such heads."""
    if device.type == "cuda":
        is_new = not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
        if not is_new or not torch.backends.cuda.is_flash_attention_available():
            return False
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD


@functools.cache
def use_newest_kernels(device: torch.device, *, dtype: torch.dtype, head_dim: int) -> str:
    """Use FA3 or FA4 in this process if installed and consistent with FA2; return the kernels in use.

    They replace torch's flash kernels, FA2, for all users in the process.
    """
    names = _NEWER_KERNELS.get(torch.cuda.get_device_capability(device)[0], ())
    blocks = plan_blocks(np.array([0, 200, 250, 251]), ((0, 200, 250),), device=device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(251, heads, head_dim) for heads in (2, 1, 1)]
    qkv = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]

    def attend() -> list[Tensor]:
        out = varlen_attention(qkv, blocks, scale=head_dim**-0.5)
        return [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]

    return _first_that_agrees(names, attend)


def _first_that_agrees(names: Sequence[str], attend: Callable[[], list[Tensor]]) -> str:
    """Activate the first optional kernels whose results match FA2, and log the selection."""

    def use_own() -> None:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()

    use_own()
    expected = attend() if names else []
    chosen, problems = "FA2", {}
    for name in (name for name in names if name not in _refused):
        try:
            attention.activate_flash_attention_impl(name)
            torch.testing.assert_close(attend(), expected, rtol=_ROUNDING, atol=_ROUNDING)
        except Exception as error:  # prototypes may raise anything; FA2 remains available
            _refused.add(name)
            problems[name] = f"{type(error).__name__}: {error}"
            use_own()
        else:
            chosen = name
            break
    _log.info("flash_attention_kernels", kernels=chosen, not_used=problems)
    return chosen
