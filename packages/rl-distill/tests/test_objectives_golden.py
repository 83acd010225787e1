"""Every file of GOLDEN_DIR (default tests/golden): an independent implementation's numbers on padded [B, W] rows."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_distill.objectives import (
    ADVANTAGES,
    AGGREGATION,
    KL,
    PolicyTokens,
    RewardedRows,
    entropy_from_logits,
    grpo_advantages,
    logprobs_from_logits,
    mismatch_metrics,
    ppo_clip,
    token_weights,
    truncated_weights,
)

GOLDEN_DIR = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))
FILES = sorted(GOLDEN_DIR.glob("*.npz"))
DTYPES = [torch.float32, torch.float64]


class Golden:
    """One file, its padded rows flattened; the rows are either kept with their padding or packed without it."""

    def __init__(self, path, *, dtype, is_packed):
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name]) for name in arrays if arrays[name].dtype.kind in "fi"}
        self.dtype = dtype
        mask = self.arrays["mask"] > 0
        self.width = mask.shape[1]
        self.keep = mask if is_packed else torch.ones_like(mask)
        self.loss_mask = mask[self.keep]
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.keep.sum(1).cumsum(0)])

    def tokens(self, name):
        """[T] of a [B, W] array, as input."""
        return self.arrays[name][self.keep].to(self.dtype)

    def expect(self, found, name, *, is_masked=True):
        """Compare tokens or a scalar with the golden array of this name."""
        expected = self.arrays[name]
        if expected.ndim == 2:
            expected = expected[self.keep]
            if is_masked:
                expected = torch.where(self.loss_mask, expected, 0.0)
        scale = float(expected.double().abs().max())
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6 * max(scale, 0.1))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(params=["packed", "padded"])
def golden(path, request):
    return Golden(path, dtype=torch.float32, is_packed=request.param == "packed")


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def packed(path, request):
    return Golden(path, dtype=request.param, is_packed=True)


def weights_of(golden, mode):
    horizon = golden.width if mode.endswith("norm") else None
    return token_weights(golden.loss_mask, golden.offsets, row_weights=AGGREGATION.get(mode), horizon=horizon)


def test_there_are_golden_files():
    assert FILES, f"no .npz in {GOLDEN_DIR}; set GOLDEN_DIR"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_advantages(golden, name):
    rows = RewardedRows(
        rewards=golden.arrays["score"],
        group=golden.arrays["group"],
        session=torch.arange(len(golden.arrays["group"])),
        output=torch.zeros_like(golden.arrays["group"]),
        loss_mask=golden.loss_mask,
        offsets=golden.offsets,
    )
    golden.expect(ADVANTAGES.get(name)(rows)["advantages"], f"advantage/{name}")


def test_grpo_in_float64_is_exact(path):
    golden = Golden(path, dtype=torch.float64, is_packed=True)
    rewards, group = golden.arrays["score"].numpy().astype(np.float64), golden.arrays["group"].numpy()
    of_group = [rewards[group == g] for g in group]
    expected = [(r - g.mean()) / (g.std(ddof=1) + 1e-6) for r, g in zip(rewards, of_group, strict=True)]
    found = grpo_advantages(torch.from_numpy(rewards), torch.from_numpy(group))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
def test_aggregations(golden, mode):
    found = (golden.tokens("advantages") * weights_of(golden, mode)).sum()
    golden.expect(found, f"aggregate/{mode}")


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_kl(packed, name):
    found = KL.get(name)(packed.tokens("logprobs"), packed.tokens("reference_logprobs"))
    packed.expect(found, f"kl/{name}")


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_ppo_clip_loss_and_gradient(golden, mode):
    policy = golden.tokens("logprobs").requires_grad_()
    tokens = PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=golden.tokens("old_logprobs"),
        advantages=golden.tokens("advantages"),
        loss_mask=golden.loss_mask,
        offsets=golden.offsets,
    )
    losses = ppo_clip(tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0).losses
    loss = (weights_of(golden, mode) * losses).sum()
    loss.backward()
    golden.expect(loss.detach(), f"policy_loss/vanilla/{mode}")
    golden.expect(policy.grad, f"policy_grad/vanilla/{mode}")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights(golden, level):
    log_ratio = golden.tokens("old_logprobs") - golden.tokens("rollout_logprobs")
    found = truncated_weights(log_ratio, golden.loss_mask, golden.offsets, level=level, cap=2.0)
    golden.expect(found, f"correction/tis/{level}")


def test_mismatch_metrics(golden):
    metrics = mismatch_metrics(
        golden.tokens("old_logprobs"), golden.tokens("rollout_logprobs"), golden.loss_mask, golden.offsets
    )
    names = [name for name in metrics if f"correction_metric/{name}" in golden.arrays]
    assert len(names) == len(metrics) - 1 == 13, "all but training/rollout_probs_diff_mean are golden"
    for name in names:
        golden.expect(metrics[name], f"correction_metric/{name}")


def test_logprobs_and_entropy(path):
    golden = Golden(path, dtype=torch.float32, is_packed=False)
    logits, labels = golden.arrays["logits"], golden.arrays["labels"]
    golden.expect(logprobs_from_logits(logits, labels)[golden.keep], "logprobs_from_logits", is_masked=False)
    golden.expect(entropy_from_logits(logits)[golden.keep], "entropy", is_masked=False)


def test_logprobs_and_entropy_in_float64(path):
    golden = Golden(path, dtype=torch.float64, is_packed=False)
    logits = golden.arrays["logits"].double()
    expected = torch.log_softmax(logits, -1)
    labels = golden.arrays["labels"]
    torch.testing.assert_close(
        logprobs_from_logits(logits, labels), expected.gather(-1, labels[..., None])[..., 0], rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        entropy_from_logits(logits), -(expected.exp() * expected).sum(-1), rtol=1e-10, atol=1e-10
    )
