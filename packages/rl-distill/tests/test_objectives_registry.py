import subprocess
import sys

import pytest

from rl_core.errors import SettingsError
from rl_distill.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    SESSION_RULES,
    policy_loss_with_options,
)
from rl_distill.objectives.advantages import grpo
from rl_distill.objectives.policy_loss import ppo_clip
from rl_distill.objectives.registry import function_with_options


def test_registries_have_the_documented_names():
    assert set(ADVANTAGES.names()) >= {
        *("gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("remax", "opo", "gpg", "grpo_passk", "gdpo", "lite_ppo", "maxrl", "optimal_token_baseline"),
    }
    assert set(POLICY_LOSSES.names()) >= {
        *("ppo_clip", "gspo", "sapo", "gpg", "geo_mean", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"),
    }
    assert KL_ESTIMATORS.names() == ["abs", "abs+", "k1", "k1+", "k2", "k3", "k3+"]
    assert AGGREGATIONS.names() == [
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "token-mean",
        "token-sum",
    ]
    assert SESSION_RULES.names() == ["each", "last", "last_only", "mean"]
    assert REJECTION_CRITERIA.names() == [
        *("seq_max_k2", "seq_max_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
        *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "token_k1", "token_k2", "token_k3"),
    ]
    assert ADVANTAGES.get("grpo") is grpo


def test_unknown_name_gives_the_nearest_and_all():
    with pytest.raises(
        SettingsError, match=r"unknown advantage 'gropo'\. Did you mean 'grpo'\? Known: dr_grpo, gae, gdpo, gpg, grpo, "
    ):
        ADVANTAGES.get("gropo")
    with pytest.raises(
        SettingsError, match=r"unknown KL estimator 'zzz'\. Known: abs, abs\+, k1, k1\+, k2, k3, k3\+\."
    ):
        KL_ESTIMATORS.get("zzz")


def test_options_of_a_policy_loss_and_of_its_selection_are_told_apart():
    bound = policy_loss_with_options("kl_cov", {"share": 0.5, "kl_to_old_coefficient": 2.0})
    assert bound.loss.keywords == {"kl_to_old_coefficient": 2.0}
    assert bound.select.keywords == {"share": 0.5}
    assert policy_loss_with_options("ppo_clip", {}).select is None
    with pytest.raises(SettingsError, match=r"'kl_cov': 'shar'. Did you mean 'share'"):
        policy_loss_with_options("kl_cov", {"shar": 0.5})


def test_unknown_option_gives_the_nearest():
    with pytest.raises(
        SettingsError, match=r"unknown option of policy loss 'ppo_clip': 'clip_hi'\. Did you mean 'clip_high'"
    ):
        function_with_options(POLICY_LOSSES, "ppo_clip", {"clip_hi": 0.3})
    assert function_with_options(POLICY_LOSSES, "ppo_clip", {}) is ppo_clip
    assert function_with_options(POLICY_LOSSES, "ppo_clip", {"clip_high": 0.3}).keywords == {"clip_high": 0.3}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that adds a package with entry points to sys.path, as if installed."""

    def install(points):
        folder = tmp_path / "outside-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in points.items())
        (folder / "entry_points.txt").write_text(f"[rl_distill.policy_losses]\n{lines}\n")
        (tmp_path / "outside_losses.py").write_text("def mine(tokens, *, temper=1.0):\n    return temper\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("outside_losses", None)


def test_entry_points_of_other_packages_are_found(installed):
    installed({"mine": "outside_losses:mine"})
    assert "mine" in POLICY_LOSSES.names()
    assert "outside_losses" not in sys.modules, "imported only when asked for"
    assert function_with_options(POLICY_LOSSES, "mine", {"temper": 2.0})(None) == 2.0


def test_import_loads_nothing_heavy():
    heavy = ("megatron", "vllm", "ray", "transformers", "wandb")
    code = f"import sys, rl_distill.objectives, rl_distill.testing; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"
