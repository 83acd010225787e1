"""A learning step on policies, teachers and critics that are tables of logits, and its loss in plain float64."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COMPONENTS = ("style", "acc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trajectory: its place, its rewards, and what models say about each token.

    Attributes:
        group: Prompt.
        session: Session in the group.
        output: Place in the session.
        reward: Reward.
        baseline: Reward of the greedy response.
        components: Components of the reward by name.
        is_truncated: Whether a limit ended it.
        ids: [T] tokens.
        mask: [T] bool, True at trained tokens.
        engine: [T] the engine's logprobs.
        old: [T, V] logprobs of the learner before the update.
        reference: [T, V] those of the initial policy.
        teacher: [T, V] those of the teacher.
        values: [T] the critic's values before the update.
        weights: [T] values of the critic in training.
    """

    group: int
    session: int
    output: int
    reward: float
    baseline: float
    components: Mapping[str, float]
    is_truncated: bool
    ids: Tensor
    mask: Tensor
    engine: Tensor
    old: Tensor
    reference: Tensor
    teacher: Tensor
    values: Tensor
    weights: Tensor

    def sampled(self, table: Tensor) -> Tensor:
        """Return [T] values of the row's own tokens in a table [T, V]."""
        return table.gather(-1, self.ids[:, None])[:, 0]


def k3_of(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def kl_of(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) at each token; with "+", the gradient is that of k2."""
    difference = policy - reference
    found = {"k1": difference, "abs": difference.abs(), "k2": difference.square() / 2, "k3": k3_of(-difference)}
    value = found[name.rstrip("+")]
    return value if not name.endswith("+") else value.detach() + found["k2"] - found["k2"].detach()


class Oracle:
    """Loss of the policy and of the critic over a whole batch, row by row.

    Attributes:
        advantages: [T] of each row.
        returns: [T] of each row, for the critic.
        weights: [T] weight of each token in the loss, of each row.
    """

    def __init__(self, rows: Sequence[Row], chosen: Mapping[str, Any], *, horizon: int) -> None:
        """Compute all that does not depend on the policy in training.

        Args:
            rows: The batch.
            chosen: Settings by the names of `test_crossed_algorithms`.
            horizon: Length by which seq-mean-token-sum-norm divides.
        """
        self._rows, self._chosen = rows, chosen
        self._teaches = chosen["distillation"] != "none"
        self._has_rewards = not self._teaches or chosen["use_task_rewards"]
        self._as_reward = self._teaches and chosen["used_as"] == "reward"
        self._has_gradient = self._has_rewards or self._as_reward
        self._old = [row.sampled(row.old) if chosen["old_logprobs"] == "recompute" else row.engine for row in rows]
        self._correction = [self._correct(row) for row in rows]
        self.returns: list[Tensor] = []
        self.advantages = self._all_advantages()
        self._masks = [self._trained(row) for row in rows]
        self._selected = self._selection()
        self.weights = self._aggregation(horizon)

    def loss(self, tables: Sequence[Tensor]) -> Tensor:
        """Return the loss of the policy with these logits [T, V] of each row."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (row, table) in enumerate(zip(self._rows, tables, strict=True)):
            log_q, weights = table.log_softmax(-1), self.weights[number]
            policy = row.sampled(log_q)
            if not self._teaches or self._as_reward or self._has_rewards:
                total = total + (weights * self._policy_terms(number, policy, log_q)).sum()
            if self._teaches and not self._as_reward:
                total = total + 0.5 * (weights * self._divergence(row, policy, log_q)).sum()
        return total

    def value_loss(self) -> Tensor:
        """Return the critic's loss."""
        total = torch.zeros((), dtype=torch.float64)
        for row, returns, weights in zip(self._rows, self.returns, self.weights, strict=True):
            held = row.weights.clamp(row.values - 0.2, row.values + 0.2)
            errors = torch.maximum((row.weights - returns).square(), (held - returns).square())
            total = total + (weights * errors / 2).sum()
        return total

    def _correct(self, row: Row) -> Tensor:
        level = self._chosen["weights"]
        if level == "none" or not self._has_gradient:
            return torch.ones_like(row.engine)
        ratio = torch.where(row.mask, row.sampled(row.old) - row.engine, 0.0)
        weight = (ratio if level == "token" else ratio.sum().expand_as(ratio)).exp()
        if self._chosen["floor"] is None:
            return weight.clamp(max=2.0)
        return torch.where((weight >= self._chosen["floor"]) & (weight <= 2.0), weight, 0.0)

    def _trained(self, row: Row) -> Tensor:
        mask = row.mask.clone()
        last = max((r for r in self._rows if (r.group, r.session) == (row.group, row.session)), key=lambda r: r.output)
        if self._chosen["mask_truncated"] and last.is_truncated:
            mask[:] = False
        log_ratio = row.sampled(row.old) - row.engine
        if self._chosen["reject"] == "token_k1" and self._has_gradient:
            mask &= log_ratio.abs() <= math.log(1.5)
        if self._chosen["reject"] == "seq_mean_k3" and self._has_gradient and mask.any():
            mask &= k3_of(log_ratio)[mask].mean() <= 0.06
        return mask

    def _selection(self) -> list[Tensor]:
        """Return the tokens that Clip-Cov and KL-Cov treat separately: here those with the largest covariance."""
        flat, old = torch.cat(self._masks), torch.cat(self._old)
        advantages = torch.cat(self.advantages)
        covariance = (old - old[flat].mean()) * (advantages - advantages[flat].mean())
        if self._chosen["policy_loss"] == "clip_cov":  # the band is below as many tokens as the share allows
            selected = flat & (covariance > 0.05) & (covariance < 0.4)
        else:
            count = max(1, int(0.25 * int(flat.sum())))
            floor = covariance.masked_fill(~flat, -math.inf).sort(descending=True).values[count - 1]
            selected = flat & (covariance >= floor)
        return list(selected.split([len(row.ids) for row in self._rows]))

    def _aggregation(self, horizon: int) -> list[Tensor]:
        counts = [int(mask.sum()) for mask in self._masks]
        num_rows = sum(count > 0 for count in counts)
        of_rows = {
            "token-mean": [1 / sum(counts)] * len(counts),
            "token-sum": [1.0] * len(counts),
            "seq-mean-token-sum": [1 / num_rows] * len(counts),
            "seq-mean-token-sum-norm": [1 / num_rows / horizon] * len(counts),
            "seq-mean-token-mean": [1 / num_rows / max(count, 1) for count in counts],
        }[self._chosen["aggregation"]]
        return [mask * weight for mask, weight in zip(self._masks, of_rows, strict=True)]

    def _policy_terms(self, number: int, policy: Tensor, log_q: Tensor) -> Tensor:
        row, chosen = self._rows[number], self._chosen
        losses = self._policy_losses(number, policy) * self._correction[number]
        if chosen["kl_coefficient"] and chosen["kl_in"] == "loss":
            found = kl_of(chosen["kl_estimator"], policy, row.sampled(row.reference))
            losses = losses + chosen["kl_coefficient"] * found
        return losses + chosen["entropy_coefficient"] * (log_q.exp() * log_q).sum(-1)

    def _policy_losses(self, number: int, policy: Tensor) -> Tensor:
        old, advantages, mask = self._old[number], self.advantages[number], self._masks[number]
        selected, ratio, fixed = self._selected[number], (policy - old).exp(), (policy - old).exp().detach()

        def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
            return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))

        name = self._chosen["policy_loss"]
        if not mask.any():
            return 0.0 * policy
        if name == "ppo_clip":
            losses = clipped(ratio, 0.2, 0.2)
            return torch.where(advantages < 0, torch.minimum(losses, -3 * advantages), losses)
        if name == "gspo":
            mean = (policy - old)[mask].mean().detach()
            return clipped((policy - policy.detach() + mean).exp(), 3e-4, 4e-4)
        if name == "geo_mean":
            log_ratio = policy - old
            held = torch.where(advantages > 0, log_ratio.clamp(max=0.4), log_ratio.clamp(min=-0.4))
            held = torch.where(advantages == 0, 0.0, held)
            return -(advantages[mask].mean() * held[mask].mean().exp()).expand_as(policy)
        if name == "sapo":
            tau = torch.where(advantages > 0, 1.0, 1.05)
            return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        if name == "gpg":
            return -advantages * policy
        if name == "cispo":
            return -advantages * fixed.clamp(0.8, 1.28) * policy
        if name == "dro":
            return 0.025 * (policy - old).square() - advantages * policy
        if name == "clip_cov":
            return torch.where(selected, 0.0, clipped(ratio, 0.2, 0.2))
        if name == "kl_cov":
            return -advantages * ratio + torch.where(selected, (policy - old).abs(), 0.0)
        p, q = policy.detach().exp(), old.exp()
        if name == "dppo_tv":
            near = torch.where(advantages > 0, p - q <= 0.2, q - p <= 0.2)
        else:
            kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            near = (kl <= 0.05) | torch.where(advantages > 0, p <= q, p >= q)
        return -advantages * near * fixed.clamp(max=20) * policy

    def _divergence(self, row: Row, policy: Tensor, log_q: Tensor) -> Tensor:
        kind, tail = self._chosen["distillation"], self._chosen["tail"]
        if kind in ("k1", "abs", "k2", "k3"):
            return kl_of({"k1": "k1+", "abs": "abs+"}.get(kind, kind), policy, row.sampled(row.teacher))
        log_p, best = row.teacher.topk(3, dim=-1)
        log_q = log_q.gather(-1, best)
        if tail == "renormalise":
            log_p, log_q = (one - one.logsumexp(-1, keepdim=True) for one in (log_p, log_q))
        if tail == "bucket":
            log_p, log_q = (torch.cat([one, (1 - one.exp().sum(-1, keepdim=True)).log()], -1) for one in (log_p, log_q))
        p, q = log_p.exp(), log_q.exp()
        if kind == "forward_kl":
            return (p * (log_p - log_q)).sum(-1)
        if kind == "reverse_kl":
            return (q * (log_q - log_p)).sum(-1)
        middle = ((p + q) / 2).log()
        return (p * (log_p - middle) + q * (log_q - middle)).sum(-1) / 2

    def _all_advantages(self) -> list[Tensor]:
        found = [torch.zeros_like(row.engine) for row in self._rows]
        if self._has_rewards:
            found = self._from_rewards()
        if self._as_reward:
            kind = self._chosen["distillation"]
            for number, row in enumerate(self._rows):
                estimate = kl_of(kind, self._old[number], row.sampled(row.teacher))
                found[number] = found[number] - 0.5 * estimate
        return [torch.where(row.mask, one, 0.0) for row, one in zip(self._rows, found, strict=True)]

    def _penalties(self) -> list[Tensor]:
        chosen = self._chosen
        if not (chosen["kl_coefficient"] and chosen["kl_in"] == "reward"):
            return [torch.zeros_like(row.engine) for row in self._rows]
        return [
            torch.where(
                row.mask,
                -chosen["kl_coefficient"] * kl_of(chosen["kl_estimator"], old, row.sampled(row.reference)),
                0.0,
            )
            for row, old in zip(self._rows, self._old, strict=True)
        ]

    def _units(self, rewards: Sequence[float]) -> tuple[list[Any], dict[Any, float], list[float]]:
        """Return each row's unit, each unit's reward, and each row's share of its advantage."""
        rule = self._chosen["session_rule"]
        units: list[Any] = [(row.group, row.session, row.output if rule == "each" else None) for row in self._rows]
        members: dict[Any, list[int]] = {}
        for number, unit in enumerate(units):
            members.setdefault(unit, []).append(number)
        last = {unit: max(of, key=lambda n: self._rows[n].output) for unit, of in members.items()}
        if rule == "mean":
            worth = {unit: sum(rewards[n] for n in of) / len(of) for unit, of in members.items()}
        else:
            worth = {unit: rewards[last[unit]] for unit in members}
        shares = [1.0 if rule != "last_only" or last[unit] == n else 0.0 for n, unit in enumerate(units)]
        return units, worth, shares

    def _from_rewards(self) -> list[Tensor]:
        name, rows, penalties = self._chosen["advantage"], self._rows, self._penalties()
        totals = [row.reward + float(one.sum()) for row, one in zip(rows, penalties, strict=True)]
        if name == "remax":
            totals = [total - row.baseline for total, row in zip(totals, rows, strict=True)]
        if name in ("gae", "reinforce_plus_plus", "optimal_token_baseline"):
            return self._by_token(penalties)
        units, worth, shares = self._units(totals)
        lengths = {
            unit: sum(int(r.mask.sum()) for r, u in zip(rows, units, strict=True) if u == unit) for unit in worth
        }
        if name == "gdpo":
            scores = dict.fromkeys(worth, 0.0)
            for component, weight in zip(COMPONENTS, (1.0, 2.0), strict=True):
                of = self._units([row.components[component] for row in rows])[1]
                for unit, score in compared("grpo", of, lengths).items():
                    scores[unit] += weight * score
        else:
            scores = compared(name, worth, lengths)
        of_rows = [torch.full_like(row.engine, scores[unit]) for row, unit in zip(rows, units, strict=True)]
        if name in ("gdpo", "reinforce_plus_plus_baseline"):
            of_rows = self._whitened(of_rows)
        return [share * one for share, one in zip(shares, of_rows, strict=True)]

    def _by_token(self, penalties: Sequence[Tensor]) -> list[Tensor]:
        name, rows = self._chosen["advantage"], self._rows
        units, worth, shares = self._units([row.reward for row in rows])
        found = []
        for row, unit, penalty in zip(rows, units, penalties, strict=True):
            places = row.mask.nonzero()[:, 0].tolist()
            rewards = [float(penalty[place]) for place in places]
            rewards[-1] += worth[unit]
            gained = torch.zeros_like(row.engine)
            returns, ahead, value = torch.zeros_like(row.engine), 0.0, 0.0
            for place, reward in reversed(list(zip(places, rewards, strict=True))):
                if name == "gae":  # gamma = 0.9, lam = 0.8
                    ahead = reward + 0.9 * value - float(row.values[place]) + 0.72 * ahead
                    value = float(row.values[place])
                    returns[place] = ahead + value
                else:
                    ahead = reward + (0.9 if name == "reinforce_plus_plus" else 1.0) * ahead
                    returns[place] = ahead
                gained[place] = ahead
            found.append(gained)
            self.returns.append(returns)
        found = self._minus_baselines(found) if name == "optimal_token_baseline" else self._whitened(found)
        return [share * one for share, one in zip(shares, found, strict=True)]

    def _minus_baselines(self, gained: Sequence[Tensor]) -> list[Tensor]:
        energies: list[list[float]] = []
        for row, correction in zip(self._rows, self._correction, strict=True):
            each = 1 - 2 * row.sampled(row.old).exp() + row.old.exp().square().sum(-1)
            energies.append((each * correction.square())[row.mask].cumsum(0).tolist())
        found = [one.clone() for one in gained]
        for number, row in enumerate(self._rows):
            for step, place in enumerate(row.mask.nonzero()[:, 0].tolist()):
                peers = [
                    (energies[n][step], float(gained[n][other.mask][step]))
                    for n, other in enumerate(self._rows)
                    if other.group == row.group and len(energies[n]) > step
                ]
                if len(peers) > 1:
                    found[number][place] -= sum(w * g for w, g in peers) / (sum(w for w, _ in peers) + 1e-8)
        return found

    def _whitened(self, values: Sequence[Tensor]) -> list[Tensor]:
        kept = torch.cat([one[row.mask] for one, row in zip(values, self._rows, strict=True)])
        return [(one - kept.mean()) / (kept.var() + 1e-8).sqrt() for one in values]


def compared(name: str, worth: Mapping[Any, float], lengths: Mapping[Any, int]) -> dict[Any, float]:
    """Return the advantage of each unit, whose key starts with its group."""
    found = {}
    groups = {group: [u for u in worth if u[0] == group] for group in {unit[0] for unit in worth}}
    everything = torch.tensor(list(worth.values()), dtype=torch.float64)
    teaching = [u for u in worth if len({worth[v] for v in groups[u[0]]}) > 1]
    for unit, reward in worth.items():
        peers = [worth[u] for u in groups[unit[0]]]
        mean = sum(peers) / len(peers)
        deviation = float(torch.tensor(peers, dtype=torch.float64).std()) if len(peers) > 1 else 0.0
        centered = reward - mean
        if name == "remax":
            found[unit] = reward
        elif name in ("dr_grpo", "reinforce_plus_plus_baseline"):
            found[unit] = centered
        elif deviation == 0:
            found[unit] = 0.0
        elif name == "grpo":
            found[unit] = centered / (deviation + 1e-6)
        elif name == "rloo":
            found[unit] = reward - (sum(peers) - reward) / (len(peers) - 1)
        elif name == "opo":
            of = [lengths[u] for u in groups[unit[0]]]
            found[unit] = reward - sum(n * r for n, r in zip(of, peers, strict=True)) / sum(of)
        elif name == "gpg":
            found[unit] = centered * len(worth) / len(teaching)
        elif name == "grpo_passk":
            best, second = sorted(peers)[-1], sorted(peers)[-2]
            found[unit] = (best - second) / (deviation + 1e-6) if reward == best else 0.0
        elif name == "lite_ppo":
            found[unit] = centered / (float(everything.std()) + 1e-6)
        elif name == "maxrl":
            found[unit] = centered / mean
    return found
