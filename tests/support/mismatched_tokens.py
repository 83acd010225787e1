"""Trajectories of a small softmax policy whose engine and learner differ for a known reason."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_metrics.run_files.rollout_log import RolloutRow

Floats = NDArray[np.float64]

NUM_TOKENS = 32
NUM_STATES = 64
DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedRun:
    """A run that trains a policy over 32 tokens; the engine samples them, and the learner recomputes their logprobs.

    Attributes:
        steps: Steps of the run.
        trajectories: Trajectories per step.
        tokens: Tokens per response.
        seed: Seed of the policy and of all samples.
        learning_rate: Step size of the learner, which moves logits towards each state's right token.
        old: Maximum staleness of the rollouts, in reported versions; drawn for each trajectory.
        lag: Versions by which the engine's weights are older than it reports.
        is_frozen: The engine keeps its first weights, but reports new versions.
        stuck_version: The engine loads no weights newer than this version, and reports it correctly.
        top_p: Top-p of the engine's sampling.
        top_k: Top-k of the engine's sampling; 0 keeps all tokens.
        temperature: Temperature of the engine; the learner's is 1.
        template: Standard deviation by which a different prompt shifts the first token's logits; halves per token.
        is_bfloat16: The engine rounds its logits to eight significant bits.
        noise: Standard deviation of the engine's logits from the learner's, as from the order of float32 sums.
        swapped: Share of tokens computed by other experts, which changes their logits by a standard deviation of 2.
        wrong: Standard deviation of a constant error in the engine's weights, as from a part that it never loaded.
    """

    steps: int = 30
    trajectories: int = 8
    tokens: int = 24
    seed: int = 0
    learning_rate: float = 0.05
    old: int = 0
    lag: int = 0
    is_frozen: bool = False
    stuck_version: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    temperature: float = 1.0
    template: float = 0.0
    is_bfloat16: bool = False
    noise: float = 1e-5
    swapped: float = 0.0
    wrong: float = 0.0

    def rows(self, *, has_policy_logprobs: bool = True) -> Iterator[RolloutRow]:
        """Yield the trajectories as a trainer writes them."""
        random = np.random.default_rng(self.seed)
        history = [self._first_weights(random)]
        missing = random.normal(0.0, self.wrong, history[0].shape) if self.wrong else 0.0
        right = random.integers(NUM_TOKENS, size=NUM_STATES)
        for step in range(1, self.steps + 1):
            learner = step - 1
            policy = _log_softmax(history[learner])
            for index in range(self.trajectories):
                said = max(learner - int(random.integers(self.old + 1)), 0)
                if self.stuck_version is not None:
                    said = min(said, self.stuck_version)
                held = 0 if self.is_frozen else max(said - self.lag, 0)
                columns = self._respond(history[held] + missing, policy, random)
                yield _row(step, index, columns, version=said, policy_version=learner, has_policy=has_policy_logprobs)
            history.append(_learned(history[-1], right, self.learning_rate))

    def _first_weights(self, random: np.random.Generator) -> Floats:
        scale = np.exp(random.uniform(np.log(0.5), np.log(5.0), size=(NUM_STATES, 1)))
        weights: Floats = random.normal(0.0, 1.0, size=(NUM_STATES, NUM_TOKENS)) * scale
        return weights

    def _respond(self, engine: Floats, policy: Floats, random: np.random.Generator) -> dict[str, list[float]]:
        entropies = -(np.exp(policy) * policy).sum(-1)
        columns: dict[str, list[float]] = {"ids": [], "rollout": [], "policy": [], "entropy": []}
        state = int(random.integers(NUM_STATES))
        for position in range(self.tokens):
            rollout = self._drawn_from(engine[state], position, random)
            token = _drawn(np.exp(rollout), random)
            columns["ids"].append(token)
            columns["rollout"].append(rollout[token])
            columns["policy"].append(policy[state, token])
            columns["entropy"].append(float(entropies[state]))
            state = (state * 7 + token + 1) % NUM_STATES
        return columns

    def _drawn_from(self, logits: Floats, position: int, random: np.random.Generator) -> Floats:
        logits = logits + random.normal(0.0, self.noise, size=NUM_TOKENS)
        if self.template:
            logits = logits + random.normal(0.0, self.template * 0.5**position, size=NUM_TOKENS)
        if random.random() < self.swapped:
            logits = logits + random.normal(0.0, 2.0, size=NUM_TOKENS)
        if self.is_bfloat16:
            logits = _bfloat16(logits)
        logprobs = _log_softmax(logits / self.temperature)
        order = np.argsort(-logprobs)
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        is_kept = before < self.top_p
        if self.top_k:
            is_kept[self.top_k :] = False
        cut = np.full(NUM_TOKENS, -np.inf)
        cut[order[is_kept]] = logprobs[order[is_kept]]
        return _log_softmax(cut)


def _drawn(probs: Floats, random: np.random.Generator) -> int:
    """Return what `random.choice(NUM_TOKENS, p=probs)` would, without its checks of every call."""
    cumulated = probs.cumsum()
    return int((cumulated / cumulated[-1]).searchsorted(random.random(), side="right"))


def _learned(weights: Floats, right: NDArray[np.int64], rate: float) -> Floats:
    """Return the weights after a policy-gradient step towards each state's right token."""
    probs = np.exp(weights - weights.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    learned: Floats = weights + rate * (np.eye(NUM_TOKENS)[right] - probs)
    return learned


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        normalised: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _bfloat16(values: Floats) -> Floats:
    """Round to eight significant bits."""
    fraction, exponent = np.frexp(values)
    rounded: Floats = np.ldexp(np.round(fraction * 256.0) / 256.0, exponent)
    return rounded


def _row(
    step: int, index: int, columns: dict[str, list[float]], *, version: int, policy_version: int, has_policy: bool
) -> RolloutRow:
    size = len(columns["ids"])
    known: dict[str, tuple[float, ...]] = {
        "token_ids": tuple(columns["ids"]),
        "versions": (version,) * size,
        "rollout_logprobs": tuple(round(value, DIGITS) for value in columns["rollout"]),
    }
    if has_policy:
        known["policy_logprobs"] = tuple(round(value, DIGITS) for value in columns["policy"])
        known["entropy"] = tuple(round(value, DIGITS) for value in columns["entropy"])
    return RolloutRow(
        step=step,
        time=float(step),
        prompt_uid=f"p{step}-{index}",
        problem=f"p{index}",
        prompt="1+1=",
        response=" ".join(f"t{token:.0f}" for token in columns["ids"]),
        policy_version=policy_version,
        tokens=tuple(f"t{token:.0f} " for token in columns["ids"]),
        mask=(True,) * size,
        columns=known,
    )
