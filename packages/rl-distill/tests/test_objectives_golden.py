"""Compare objectives with every number in the files of GOLDEN_DIR (default tests/golden).

The numbers come from an independent implementation, on padded rows. `CHECKS` selects the check of each output array by
the start of its name; an array without a check fails. Where our objectives differ on purpose, the expected number is
corrected here, with the reason.
"""

import itertools
import os
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_distill.learner import MicroBatch
from rl_distill.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PolicyTokens,
    RewardedRows,
    ValueObjective,
    grpo_advantages,
)
from rl_distill.objectives.aggregation import token_weights
from rl_distill.objectives.batch_advantages import masked_whiten
from rl_distill.objectives.correction import importance_weights, mismatch_sums
from rl_distill.objectives.registry import function_with_options
from rl_distill.objectives.rejection import rejection_mask
from rl_distill.objectives.vocabulary import vocabulary_logprobs

GOLDEN_DIR = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))
IS_OWN = "GOLDEN_DIR" not in os.environ
EXACT_INPUTS = {"score", "group", "values"}
FILES = sorted(GOLDEN_DIR.glob("*.npz"))
INPUTS = (
    *("mask", "group", "score", "values", "old_logprobs", "logprobs", "reference_logprobs", "rollout_logprobs"),
    *("reward_baselines", "advantages", "logits", "labels"),
)
NOT_OBJECTIVES = ("teacher_", "distill/", "validation", "correction_metric/rollout_corr/log_ppl_diff_m")
"""Distillation and validation have separate tests; rl-metrics computes the extremes of log_ppl_diff."""

LONE_SESSION = ("grpo", "dr_grpo", "rloo", "opo")
"""The golden advantage of a lone session is its reward, while others are centered. Here it is 0."""

OWN_AGGREGATION = ("sapo", "geo_mean")
"""The golden values of these always aggregate by seq-mean-token-mean; here the setting decides."""

BAND = (0.8, 1.25)


@lru_cache
def read_arrays(path):
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind in "fi"}


class Golden:
    """One file with its rows flattened, either with their padding or packed without it."""

    def __init__(self, path, *, dtype, is_packed):
        self.arrays = read_arrays(path)
        self.dtype = dtype
        mask = self.arrays["mask"] > 0
        self.num_rows, self.width = mask.shape
        self.num_empty = int((mask.sum(1) == 0).sum())
        self.keep = mask if is_packed else torch.ones_like(mask)
        self.loss_mask = mask[self.keep]
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.keep.sum(1).cumsum(0)])
        sizes = Counter(self.arrays["group"].tolist())
        self.is_lone = torch.tensor([sizes[group] == 1 for group in self.arrays["group"].tolist()])

    def tokens(self, name):
        """Return a [B, W] array as [T] input, with NaN at masked tokens, which must have no effect."""
        values = self.arrays[name][self.keep].to(self.dtype)
        return torch.where(self.loss_mask, values, torch.nan)

    def expected(self, name, *, is_masked=True):
        expected = self.arrays[name]
        if expected.ndim == 2:
            expected = expected[self.keep]
            if is_masked:
                expected = torch.where(self.loss_mask, expected, 0.0)
        return expected

    def weights(self, mode):
        horizon = self.width if mode.endswith("norm") else None
        return token_weights(self.loss_mask, self.offsets, row_weights=AGGREGATIONS.get(mode), horizon=horizon)

    def log_ratio(self):
        return self.tokens("old_logprobs") - self.tokens("rollout_logprobs")


def expect(found, expected):
    scale = float(expected.double().abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6 * max(scale, 0.1))


def check_advantage(golden, name):
    kind, advantage = name.split("/")
    rows = RewardedRows(
        rewards=golden.arrays["score"].to(golden.dtype),
        group=golden.arrays["group"],
        session=torch.arange(golden.num_rows),
        output=torch.zeros_like(golden.arrays["group"]),
        loss_mask=golden.loss_mask,
        offsets=golden.offsets,
        columns={"values": golden.tokens("values")},
        row_columns={"reward_baseline": golden.arrays["reward_baselines"].to(golden.dtype)},
    )
    options = {"gamma": 0.99, "lam": 0.95} if advantage == "gae" else {}
    found = function_with_options(ADVANTAGES, advantage, options)(rows)
    expected = golden.expected(name)
    if advantage in LONE_SESSION and kind == "advantage":
        expected = torch.where(lone_tokens(golden), 0.0, expected)
    if advantage == "reinforce_plus_plus_baseline" and golden.is_lone.any():
        expected = whitened_with_lone_sessions_at_zero(golden, name)
    expect(found["advantages" if kind == "advantage" else kind], expected)


def lone_tokens(golden):
    return golden.is_lone[:, None].expand_as(golden.keep)[golden.keep]


def whitened_with_lone_sessions_at_zero(golden, name):
    """Set lone sessions to the whitened value of 0, then whiten again; whitening is affine."""
    first = golden.arrays[name][:, 0].double()  # each session's advantage, from its first token
    group = golden.arrays["group"]
    compared = group == group[~golden.is_lone][0]
    zero = first[compared].mean()  # centered rewards of a group sum to 0
    values = torch.where(lone_tokens(golden), zero, golden.expected(name).double())
    return masked_whiten(values, golden.loss_mask)


def check_aggregate(golden, name):
    advantages = torch.where(golden.loss_mask, golden.tokens("advantages"), 0.0)
    found = (advantages * golden.weights(name.removeprefix("aggregate/"))).sum()
    expect(found, golden.expected(name))


def check_kl(golden, name):
    found = KL_ESTIMATORS.get(name.removeprefix("kl/"))(golden.tokens("logprobs"), golden.tokens("reference_logprobs"))
    expect(torch.where(golden.loss_mask, found, 0.0), golden.expected(name))


def check_policy(golden, name):
    kind, loss_name, mode = name.split("/")
    options = {"clip_low": 0.2, "clip_high": 0.28} if loss_name not in ("sapo", "gpg") else {}
    options |= {"dual_clip": 3.0} if loss_name == "vanilla" else {}
    options |= {"ratio_cap": 3.0} if loss_name.startswith("dppo") else {}  # there, one constant serves both purposes
    policy_loss = function_with_options(POLICY_LOSSES, loss_name.replace("vanilla", "ppo_clip"), options)
    policy = golden.tokens("logprobs").requires_grad_()
    tokens = PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=golden.tokens("old_logprobs"),
        advantages=golden.tokens("advantages"),
        loss_mask=golden.loss_mask,
        offsets=golden.offsets,
    )
    losses = torch.where(golden.loss_mask, policy_loss(tokens).losses, 0.0)
    weights = golden.weights("seq-mean-token-mean" if loss_name in OWN_AGGREGATION else mode)
    if loss_name == "geo_mean":  # there, rows without trained tokens count in the mean
        weights = weights * (golden.num_rows - golden.num_empty) / golden.num_rows
    loss = (weights * losses).sum()
    loss.backward()
    expect(loss.detach() if kind == "policy_loss" else policy.grad, golden.expected(name))


def check_value_loss(golden, name):
    columns = {
        "values": golden.tokens("values"),
        "returns": golden.tokens("advantages"),
        "loss_mask": golden.loss_mask,
        "loss_weights": golden.weights("token-mean"),
    }
    ids = torch.zeros(len(golden.loss_mask), dtype=torch.int64)
    micro = MicroBatch(input_ids=ids, position_ids=ids, offsets=golden.offsets, columns=columns)
    found, sums = ValueObjective(clip=0.2)(golden.tokens("values") + 0.3, micro)
    expect(found, golden.expected(name))
    expect(sums["critic/vf_loss"][0] / sums["critic/vf_loss"][1], golden.expected(name))


def check_logits(golden, name):
    logits, labels = (golden.arrays[array][golden.keep] for array in ("logits", "labels"))
    logprobs, entropy = vocabulary_logprobs(logits.to(golden.dtype), labels)
    expect(logprobs if name == "logprobs_from_logits" else entropy, golden.expected(name, is_masked=False))


def check_whitened(golden, name):
    expect(masked_whiten(golden.tokens("advantages"), golden.loss_mask), golden.expected(name))


def check_truncated_weights(golden, name):
    level = name.removeprefix("correction/tis/")
    found = importance_weights(golden.log_ratio(), golden.loss_mask, golden.offsets, level=level, cap=2.0)
    expect(found, golden.expected(name))


def check_rejection(golden, name):
    criterion = name.removeprefix("correction/reject/")
    found, _ = rejection_mask(golden.log_ratio(), golden.loss_mask, golden.offsets, bounds={criterion: BAND})
    expect(found.float(), golden.expected(name))


def check_correction_metric(golden, name):
    name = name.removeprefix("correction_metric/")
    logprobs = (golden.tokens("old_logprobs"), golden.tokens("rollout_logprobs"))
    sums = mismatch_sums(*logprobs, golden.loss_mask, golden.offsets)
    found = {name: total / weight for name, (total, weight) in sums.items()}
    _, rejected = rejection_mask(golden.log_ratio(), golden.loss_mask, golden.offsets, bounds={"token_k1": BAND})
    found = with_empty_rows(golden, name.removeprefix("rollout_corr/"), float((found | rejected)[name]))
    expect(torch.tensor(found), golden.expected(f"correction_metric/{name}"))


def with_empty_rows(golden, name, found):
    """Add rows without trained tokens to the means, as there: with perplexity 1 and nothing rejected.

    Our metrics leave these rows out.
    """
    of_rows = ("training_", "rollout_ppl", "rollout_log_ppl", "log_ppl_", "ppl_ratio", "chi2_seq", "rollout_rs_seq")
    if not golden.num_empty or not name.startswith(of_rows):
        return found
    if name.endswith(("_max", "_min")):
        return max(found, 0.0) if name.endswith("_max") else min(found, 0.0)
    filling = 1.0 if name in ("training_ppl", "rollout_ppl", "ppl_ratio") else 0.0
    return (found * (golden.num_rows - golden.num_empty) + filling * golden.num_empty) / golden.num_rows


CHECKS = {
    "advantage/": check_advantage,
    "returns/": check_advantage,
    "aggregate/": check_aggregate,
    "kl/": check_kl,
    "policy_loss/": check_policy,
    "policy_grad/": check_policy,
    "value_loss": check_value_loss,
    "logprobs_from_logits": check_logits,
    "entropy": check_logits,
    "whitened": check_whitened,
    "correction/tis/": check_truncated_weights,
    "correction/reject/": check_rejection,
    "correction_metric/": check_correction_metric,
}


def outputs(path):
    """Return the names of the output arrays of objectives."""
    with np.load(path, allow_pickle=False) as arrays:
        names = [name for name in arrays.files if name not in INPUTS and not name.startswith(NOT_OBJECTIVES)]
    if IS_OWN:  # all arrays in our own files must be checked; other files may have unknown inputs
        return names
    return [name for name in names if name.startswith(tuple(CHECKS))]


NUMBERS = [pytest.param(path, name, id=f"{path.stem}-{name}") for path in FILES for name in outputs(path)]


def test_there_are_golden_files():
    assert FILES, f"no .npz in {GOLDEN_DIR}; set GOLDEN_DIR"
    assert len(NUMBERS) >= (60 if IS_OWN else 1) * len(FILES)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("path", "name"), NUMBERS)
def test_numbers_equal_the_golden_ones(path, name, dtype, is_packed):
    checks = [check for start, check in CHECKS.items() if name.startswith(start)]
    assert len(checks) == 1, f"{name} must have one check in CHECKS; found {len(checks)}"
    checks[0](Golden(path, dtype=dtype, is_packed=is_packed), name)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def exact(request):
    with np.load(request.param, allow_pickle=False) as arrays:
        lacking = EXACT_INPUTS - set(arrays.files)
    if lacking:
        pytest.skip(f"{request.param.name} has no {sorted(lacking)}")
    return Golden(request.param, dtype=torch.float64, is_packed=True)


def test_grpo_in_float64_is_exact(exact):
    rewards, group = exact.arrays["score"].numpy().astype(np.float64), exact.arrays["group"].numpy()
    of_group = [rewards[group == g] for g in group]
    expected = [
        (r - g.mean()) / ((g.std(ddof=1) if len(g) > 1 else 0.0) + 1e-6) for r, g in zip(rewards, of_group, strict=True)
    ]
    found = grpo_advantages(torch.from_numpy(rewards), torch.from_numpy(group))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_gae_in_float64_is_exact(exact):
    """Compare with the recursion of the paper, token by token."""
    values = exact.tokens("values").numpy()
    offsets = exact.offsets.tolist()
    advantages = np.zeros_like(values)
    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        carried = following = 0.0
        for t in reversed(range(start, stop)):
            reward = float(exact.arrays["score"][row]) if t == stop - 1 else 0.0
            carried = reward + 0.99 * following - values[t] + 0.99 * 0.95 * carried
            following = values[t]
            advantages[t] = carried
    rows = RewardedRows(
        rewards=exact.arrays["score"].double(),
        group=exact.arrays["group"],
        session=torch.arange(exact.num_rows),
        output=torch.zeros_like(exact.arrays["group"]),
        loss_mask=exact.loss_mask,
        offsets=exact.offsets,
        columns={"values": exact.tokens("values")},
    )
    found = function_with_options(ADVANTAGES, "gae", {"gamma": 0.99, "lam": 0.95, "whiten": False})(rows)
    np.testing.assert_allclose(found["advantages"].numpy(), advantages, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found["returns"].numpy(), advantages + values, rtol=1e-10, atol=1e-10)
