"""Facts about engine and learner from a run's settings, metrics and events."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_metrics.run_files.history import History
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

PROOF_EVENT = "weight_proof_failed"
PROOF_ERROR = "WeightProofError"
MOST_UNKNOWN = 0.01
"""Maximum share of tokens without the engine's experts at which routing cannot explain a mismatch."""
FLOAT32 = ("float32", "fp32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run; None if unknown.

    Attributes:
        engine_dtype: Dtype of the engine's computation.
        learner_dtype: Dtype of the learner's computation.
        top_p: Top-p of sampling.
        top_k: Top-k of sampling; 0 if off.
        min_p: Min-p of sampling.
        temperature: Temperature of sampling.
        is_mixture: Whether the policy is a mixture of experts.
        replays: Whether the learner replays the engine's experts for at least 99 % of tokens.
        proof_failures: Number of failed weight proofs.
        proof_error: Error of the last failure, empty without one.
        canary: Maximum difference of a weight proof's canary logprobs, in nats.
    """

    engine_dtype: str | None = None
    learner_dtype: str | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    is_mixture: bool | None = None
    replays: bool = False
    proof_failures: int = 0
    proof_error: str = ""
    canary: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether both sides are known to compute in float32."""
        return self.engine_dtype in FLOAT32 and self.learner_dtype in FLOAT32

    @property
    def dtypes(self) -> str:
        """Both dtypes, in words."""
        return (
            f"engine in {self.engine_dtype or 'an unknown dtype'}, learner in {self.learner_dtype or 'an unknown one'}"
        )

    @property
    def cuts(self) -> tuple[str, ...]:
        """Settings that truncate the sampling distribution, such as "rollout.top_p = 0.9"."""
        found = []
        if self.top_p is not None and self.top_p < 1.0:
            found.append(f"rollout.top_p = {self.top_p:g}")
        if self.top_k is not None and self.top_k > 0:
            found.append(f"rollout.top_k = {self.top_k:g}")
        if self.min_p is not None and self.min_p > 0.0:
            found.append(f"rollout.min_p = {self.min_p:g}")
        return tuple(found)


def facts_of(run: RunRecord) -> Facts:
    """Return the facts about a run; settings of another shape are ignored."""
    settings = run.settings
    errors = [
        str(event.get("error", ""))[:500]
        for event in run.events
        if event["event"] == PROOF_EVENT or PROOF_ERROR in str(event.get("error", ""))
    ]
    expert, unknown = _number(settings, "parallel", "expert"), _largest(run.history, "router/unknown_share")
    return Facts(
        engine_dtype=_text(settings, "engine", "dtype"),
        learner_dtype=_text(settings, "learner", "dtype"),
        top_p=_number(settings, "rollout", "top_p"),
        top_k=_number(settings, "rollout", "top_k"),
        min_p=_number(settings, "rollout", "min_p"),
        temperature=_number(settings, "rollout", "temperature"),
        is_mixture=True if unknown is not None or (expert is not None and expert > 1) else None,
        replays=unknown is not None and unknown <= MOST_UNKNOWN,
        proof_failures=len(errors),
        proof_error=errors[-1] if errors else "",
        canary=_largest(run.history, "weights/canary_max_diff"),
    )


def _value(settings: Mapping[str, Any], table: str, name: str) -> Any:
    part = settings.get(table)
    return part.get(name) if isinstance(part, dict) else None


def _text(settings: Mapping[str, Any], table: str, name: str) -> str | None:
    value = _value(settings, table, name)
    return value[:40] if isinstance(value, str) else None


def _number(settings: Mapping[str, Any], table: str, name: str) -> float | None:
    return number_or_none(_value(settings, table, name))


def _largest(history: History, name: str) -> float | None:
    column = history.get(name)
    finite = column[np.isfinite(column)] if column is not None else np.zeros(0)
    return float(finite.max()) if len(finite) else None
