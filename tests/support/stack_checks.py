"""Compare the losses of examples/stacks with the stack's own; run with the stack's interpreter and its name."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "stacks"
sys.path.insert(0, str(EXAMPLES))


def check_trl() -> None:
    """Check that TRL's loss and ours are equal on each micro-batch of a run, and that the run learns."""
    import trl
    import trl_objectives

    from rl_rollout.testing import make_tiny_model

    ours, differences = trl_objectives.loss_in_trl, []

    def compared(_policy_loss: str, *, aggregation: str) -> Any:
        loss = ours("ppo_clip", aggregation=aggregation)

        def compute(trainer: Any, model: Any, inputs: Any) -> torch.Tensor:
            trainer.loss_type = "grpo"
            theirs = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
            found = loss(trainer, model, inputs)
            grads = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in (theirs, found)]
            differences.append(max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)))
            assert max(float(grad.abs().max()) for grad in grads[0]) > 1e-3
            return found

        return compute

    trl_objectives.loss_in_trl = compared
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), is_tied=True)
        log = [entry for entry in trl_objectives.train(model, Path(folder, "out"), steps=12) if "reward" in entry]
    assert len(differences) == 12
    assert max(differences) < 1e-5, differences
    assert sum(entry["reward"] for entry in log[-3:]) > sum(entry["reward"] for entry in log[:3]) + 0.3


def check_verl() -> None:
    """Check that losses and gradients equal verl's, under the names registered in verl."""
    import numpy as np
    import verl_objectives
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn, register_policy_loss
    from verl.workers.config import ActorConfig

    register_policy_loss("wide_gspo")(verl_objectives.verl_loss("gspo", clip_low=0.2, clip_high=0.2))
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=2)
    torch.manual_seed(0)
    new = -torch.rand(6, 5)
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 2, 5, 1])[:, None]).float()
    rows = {
        "old_log_prob": (new + 0.3 * torch.randn(6, 5)).clamp(max=-1e-3),
        "advantages": torch.randn(6, 1).expand(6, 5),
        "rollout_is_weights": torch.rand(6, 5) + 0.5,
    }
    pairs = {"rl_distill/ppo_clip": "vanilla", "rl_distill/gpg": "gpg", "wide_gspo": "gspo"}
    for mode in ("token-mean", "seq-mean-token-mean"):
        for name, theirs in pairs.items():
            found = []
            for one in (name, theirs):
                leaf = new.clone().requires_grad_()
                given = {**rows, "log_prob": leaf, "response_mask": mask, "loss_agg_mode": mode, "config": config}
                loss, metrics = get_policy_loss_fn(one)(**given)
                loss.backward()
                assert all(np.isfinite(value) for value in metrics.values())
                found.append((loss.detach(), leaf.grad))
            torch.testing.assert_close(found[0], found[1], msg=lambda text, name=name: f"{name}: {text}")
    rewards = torch.zeros(6, 5)
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    index = np.array(["b", "b", "b", "a", "a", "a"], dtype=object)
    arguments = {"response_mask": mask, "index": index, "config": None}
    ours = get_adv_estimator_fn("rl_distill/grpo")(token_level_rewards=rewards.clone(), **arguments)
    theirs = get_adv_estimator_fn("grpo")(token_level_rewards=rewards.clone(), **arguments)
    torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    {"trl": check_trl, "verl": check_verl}[sys.argv[1]]()
    print("equal")  # noqa: T201 - read by the test
