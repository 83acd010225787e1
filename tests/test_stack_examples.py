"""The examples for other stacks: the plain loop here, TRL's and verl's in their own environments."""

import asyncio
import importlib
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rl_rollout.testing import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "stacks"
SCRIPTS = ("plain_pytorch", "rewards", "trl_objectives", "verl_objectives")


@pytest.fixture
def example(monkeypatch):
    """A function that imports an example by name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_plain_loop_learns_and_proves_every_update(example, tmp_path):
    loop = example("plain_pytorch")
    rewards = asyncio.run(loop.train(make_tiny_model(tmp_path, is_tied=True), steps=10))
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6


def test_trls_reward_leaves_out_what_fails(example):
    module = example("trl_objectives")

    def reward(given):
        return 1.0 / len(given.response_ids) + (given.ground_truth or 0)

    def score(**given):
        return asyncio.run(module.trl_reward(reward)(**given))

    ids = [[3, 4], [], [3]]
    assert score(prompts=["p"] * 3, completions=["ab", "", "a"], completion_ids=ids) == [0.5, None, 1.0]
    assert score(prompts=["p"], completions=["a"], completion_ids=[[3]], ground_truth=[2]) == [3.0]


def test_trls_reward_reads_messages_and_columns(example):
    def reward(given):
        (question,) = given.messages
        return float((question["content"], given.response_text, given.columns["level"]) == ("1+2?", "3", 5))

    (prompt,) = [[{"role": "user", "content": "1+2?"}]]
    said = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "4"}]
    completions = [
        [{"role": "assistant", "content": "3"}],
        [*said, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [],
    ]
    scored = example("trl_objectives").trl_reward(reward)(
        prompts=[prompt] * 5,
        completions=completions,
        completion_ids=[[3]] * 5,
        level=[5] * 5,
        trainer_state=object(),  # TRL passes these too
        log_metric=print,
        log_extra=print,
    )
    assert asyncio.run(scored) == [1.0, 1.0, 0.0, 0.0, 0.0]


class StubTrainer:
    """The parts of TRL's trainer that the loss reads, with one row of two tokens."""

    beta, current_gradient_accumulation_steps = 0.0, 2

    def __init__(self):
        self._metrics = {"train": defaultdict(list)}
        self.logprobs = torch.tensor([[-0.5, -1.0]], requires_grad=True)

    def _get_per_token_logps_and_entropies(self, model, ids, attention, num_kept, *, compute_entropy):
        assert (ids.shape, attention.shape, num_kept, compute_entropy) == ((1, 3), (1, 3), 2, True)
        return self.logprobs, torch.tensor([[0.2, 0.4]]), None


def test_loss_in_trl_is_ours_on_trls_tensors(example):
    trainer, ones = StubTrainer(), torch.ones(1, 2, dtype=torch.int64)
    inputs = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": ones,
        "tool_mask": torch.tensor([[0, 1]]),
        "advantages": torch.tensor([3.0]),
        "old_per_token_logps": torch.tensor([[-0.5, -1.0]]),
    }
    compute = example("trl_objectives").loss_in_trl("ppo_clip", aggregation="token-mean")
    loss = compute(trainer, SimpleNamespace(training=True), inputs)
    loss.backward()
    assert loss.item() == -1.5  # ratio 1, advantage 3, half of an accumulated batch
    assert trainer.logprobs.grad.tolist() == [[0.0, -1.5]]
    assert trainer._metrics["train"]["entropy"] == [pytest.approx(0.4)]
    trainer.beta = 0.1
    with pytest.raises(ValueError, match=r"Set GRPOConfig\(beta=0.0\)"):
        compute(trainer, SimpleNamespace(training=True), inputs)


def test_verl_finds_losses_and_advantages_by_name(example, monkeypatch):
    losses, advantages = {}, {}
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = sys.modules["verl.trainer.ppo.core_algos"]
    stand_in.register_policy_loss = lambda name: lambda function: losses.setdefault(name, function)
    stand_in.register_adv_est = lambda name: lambda function: advantages.setdefault(name, function)
    stand_in.agg_loss = lambda *, loss_mat, loss_mask, loss_agg_mode, batch_num_tokens: (
        (loss_mat * loss_mask).sum() / batch_num_tokens
    )
    example("verl_objectives")
    assert {"rl_distill/ppo_clip", "rl_distill/gspo"} < set(losses)
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    total, metrics = losses["rl_distill/ppo_clip"](
        old_log_prob=torch.tensor([[-1.0, -2.0]]),
        log_prob=new,
        advantages=torch.tensor([[2.0, 5.0]]),
        response_mask=torch.tensor([[1, 0]]),
        config=SimpleNamespace(global_batch_info={"batch_num_tokens": 4}),
        rollout_is_weights=torch.tensor([[0.5, 1.0]]),
    )
    total.backward()
    assert total.item() == -0.25  # ratio 1, advantage 2, weight 0.5, 4 tokens in the global batch
    assert new.grad.tolist() == [[-0.25, 0.0]]
    assert metrics["actor/ppo_kl"] == 0.0
    rewards, mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    found, _ = advantages["rl_distill/dr_grpo"](token_level_rewards=rewards, response_mask=mask, index=["p", "p"])
    assert found.tolist() == [[0.5, 0.5], [-0.5, 0.0]]


@pytest.mark.parametrize("stack", ["trl", "verl"])
def test_losses_equal_the_stacks_own(stack):
    python = os.environ.get(f"{stack.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"{stack.upper()}_PYTHON names no interpreter with {stack}, rl-rollout and rl-distill")
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    command = [python, str(ROOT / "tests" / "support" / "stack_checks.py"), stack]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": sources}, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["equal"]), done.stderr[-3000:]
