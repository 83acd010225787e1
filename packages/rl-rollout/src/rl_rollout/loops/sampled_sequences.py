"""Trajectories of sequences that another program put together from what the engine gave it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.data.records import NO_VERSION, BoolArray, FloatArray, IntArray
from rl_rollout.audit import SampledSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """The token columns of a trajectory; see `Trajectory`."""

    input_ids: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    policy_versions: IntArray


def columns_of(
    input_ids: IntArray, sampled: BoolArray, spans: Sequence[SampledSpan], *, trained: set[int]
) -> TokenColumns:
    """Give each sampled token of a sequence the logprob and version that the engine gave with it.

    A token that is called sampled, but that no span gave after just these tokens, stays in the mask without a version:
    the audit fails its session.

    Args:
        input_ids: [T] int32.
        sampled: [T] bool, what the program calls sampled.
        spans: What the engine gave.
        trained: Indices of the spans that an earlier sequence trains, which this one masks; what it trains is added.
    """
    mask = sampled.copy()
    logprobs = np.zeros(len(input_ids), dtype=np.float32)
    versions = np.full(len(input_ids), NO_VERSION, dtype=np.int32)
    for index, span in enumerate(spans):
        start = len(span.input_ids)
        stop = start + len(span.token_ids)
        if stop > len(input_ids) or not np.array_equal(input_ids[start:stop], span.token_ids):
            continue
        if not mask[start:stop].any() or not np.array_equal(input_ids[:start], span.input_ids):
            continue
        if index in trained:
            mask[start:stop] = False
            continue
        trained.add(index)
        logprobs[start:stop] = np.where(mask[start:stop], span.logprobs, 0)
        versions[start:stop] = np.where(mask[start:stop], span.policy_versions, NO_VERSION)
    return TokenColumns(input_ids=input_ids, loss_mask=mask, rollout_logprobs=logprobs, policy_versions=versions)
