import os
from pathlib import Path

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_core.errors import DataError
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.mismatch import summarize_mismatch

GOLDEN = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))


def batch_of(old, rollout, mask):
    rows = [np.asarray(row) for row in mask]

    def ragged(values, dtype):
        return Ragged.from_rows(values, dtype=dtype)

    return Batch(
        [RowKey("p", i, 0) for i in range(len(rows))],
        {
            "loss_mask": ragged(rows, np.bool_),
            "old_logprobs": ragged(old, np.float32),
            "rollout_logprobs": ragged(rollout, np.float32),
        },
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_metrics_equal_golden_values(seed):
    path = GOLDEN / f"objectives_{seed}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is in the checkout only")
    golden = np.load(path, allow_pickle=False)
    batch = batch_of(golden["old_logprobs"], golden["rollout_logprobs"], golden["mask"].astype(bool))
    metrics = summarize_mismatch(batch)
    prefix = "correction_metric/"
    expected = {name.removeprefix(prefix): float(golden[name]) for name in golden.files if name.startswith(prefix)}
    shared = {name for name in expected if "rollout_rs" not in name}
    assert len(shared) == 13
    for name in shared:
        assert metrics[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


def test_equal_logprobs_have_no_mismatch():
    logprobs = [[-0.5, -1.0, 0.0], [-2.0, -0.1, -3.0]]
    metrics = summarize_mismatch(batch_of(logprobs, logprobs, [[1, 1, 0], [1, 1, 1]]))
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    assert metrics["rollout_corr/kl"] == 0.0
    assert metrics["rollout_corr/chi2_seq"] == 0.0
    assert metrics["rollout_corr/ppl_ratio"] == 1.0
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_hand_computed_and_masked_tokens_do_not_count():
    old = [np.log([0.5, 0.25, 0.9])]
    rollout = [np.log([0.25, 0.5, 0.1])]
    metrics = summarize_mismatch(batch_of(old, rollout, [[1, 1, 0]]))
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(-1.0)
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25) / 2 - 1, rel=1e-6)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(8**0.5, rel=1e-6)


def test_differences_of_probabilities():
    metrics = summarize_mismatch(batch_of([np.log([0.5, 0.3])], [np.log([0.25, 0.4])], [[1, 1]]))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.175, rel=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25, rel=1e-6)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.15 / 2**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "rollout"), [([-1.0], [-2.0]), ([-1.0, -1.0], [-2.0, -3.0]), ([-2.0, -3.0], [-1.0, -1.0])]
)
def test_one_token_or_equal_ones_have_no_correlation(policy, rollout):
    metrics = summarize_mismatch(batch_of([policy], [rollout], [[1] * len(policy)]))
    assert "training/rollout_actor_probs_pearson_corr" not in metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(np.mean(rollout) - np.mean(policy))


def test_rows_that_train_nothing_have_no_metrics():
    assert summarize_mismatch(batch_of([[-1.0]], [[-2.0]], [[0]])) == {}


def test_hopeless_logprobs_stay_quiet():
    metrics = summarize_mismatch(batch_of([[-1e4, -1.0]], [[-1.0, -1e4]], [[1, 1]]))
    assert np.isinf(metrics["rollout_corr/training_ppl"])
    assert np.isfinite(metrics["rollout_corr/chi2_token"])


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="'reference_logprobs'"):
        summarize_mismatch(batch_of([[-1.0]], [[-2.0]], [[1]]), policy_column="reference_logprobs")
