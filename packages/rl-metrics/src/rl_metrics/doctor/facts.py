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
    """Facts about a run.

    Attributes:
        engine_dtype: Dtype of the engine's computation; None if unknown.
        learner_dtype: Dtype of the learner's computation; None if unknown.
        cuts: Settings that truncate the sampling distribution, such as "rollout.top_p = 0.9".
        suspects: Further settings that may explain a mismatch, in words.
        proof_failures: Number of failed weight proofs.
        proof_error: Error of the last failure, empty without one.
        canary: Maximum difference of a weight proof's canary logprobs, in nats; None if unknown.
    """

    engine_dtype: str | None = None
    learner_dtype: str | None = None
    cuts: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
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


def facts_of(run: RunRecord) -> Facts:
    """Return the facts about a run; settings of another shape are ignored."""
    settings = run.settings
    errors = [
        str(event.get("error", ""))[:500]
        for event in run.events
        if event["event"] == PROOF_EVENT or PROOF_ERROR in str(event.get("error", ""))
    ]
    sampling = {name: number_or_none(_value(settings, "rollout", name)) for name in ("top_p", "top_k", "min_p")}
    is_off = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    cuts = [f"rollout.{name} = {value:g}" for name, value in sampling.items() if value not in (None, is_off[name], -1)]
    return Facts(
        engine_dtype=_text(settings, "vllm", "dtype"),
        learner_dtype=_text(settings, "optimizer", "dtype"),
        cuts=tuple(cuts),
        suspects=_suspects(settings, run.history),
        proof_failures=len(errors),
        proof_error=errors[-1] if errors else "",
        canary=_largest(run.history, "weights/canary_max_diff"),
    )


def _suspects(settings: Mapping[str, Any], history: History) -> tuple[str, ...]:
    suspects = []
    temperature = number_or_none(_value(settings, "rollout", "temperature"))
    if temperature not in (None, 1.0):
        suspects.append(f"rollout.temperature is {temperature:g}: engine and learner must both apply it")
    unknown = _largest(history, "router/unknown_share")
    is_mixture = unknown is not None or (number_or_none(_value(settings, "parallel", "expert")) or 0) > 1
    if is_mixture and (unknown is None or unknown > MOST_UNKNOWN):
        suspects.append("the policy is a mixture, and the learner does not replay the engine's experts")
    return tuple(suspects)


def _value(settings: Mapping[str, Any], table: str, name: str) -> Any:
    part = settings.get(table)
    return part.get(name) if isinstance(part, dict) else None


def _text(settings: Mapping[str, Any], table: str, name: str) -> str | None:
    value = _value(settings, table, name)
    return value[:40] if isinstance(value, str) else None


def _largest(history: History, name: str) -> float | None:
    column = history.get(name)
    finite = column[np.isfinite(column)] if column is not None else np.zeros(0)
    return float(finite.max()) if len(finite) else None
