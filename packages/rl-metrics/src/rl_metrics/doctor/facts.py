"""Facts about engine and learner from a run's settings, metrics and events."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rl_metrics.run_files.history import FloatColumn, History
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_UNKNOWN = 0.01
"""Maximum share of tokens without the engine's experts at which routing cannot explain a mismatch."""
FLOAT32 = ("float32", "fp32", "float64")
CANARY_EXACT = 1e-3
"""Maximum difference of a proof's canary in float32, in nats; the proof's own bound."""
CANARY_ROUNDED = 0.3
"""The same in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run.

    Attributes:
        engine_dtype: Dtype of the engine's computation; None if unknown.
        learner_dtype: Dtype of the learner's computation; None if unknown.
        cuts: Settings that truncate the sampling distribution, such as "rollout.top_p = 0.9".
        suspects: Further settings that may explain a mismatch, in words.
        failed_proofs: Why the engine does not have the learner's weights, in words: failed weight proofs, or a proof's
            canary that differs.
    """

    engine_dtype: str | None = None
    learner_dtype: str | None = None
    cuts: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    failed_proofs: tuple[str, ...] = ()

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
    names = ("rollout", "vllm", "optimizer", "parallel")
    tables = [run.settings.get(name) for name in names]
    rollout, vllm, optimizer, parallel = (table if isinstance(table, dict) else {} for table in tables)
    dtypes = [dtype[:40] if isinstance(dtype := table.get("dtype"), str) else None for table in (vllm, optimizer)]
    sampling = {name: number_or_none(rollout.get(name)) for name in ("top_p", "top_k", "min_p", "temperature")}
    cuts = [
        f"rollout.{name} = {sampling[name]:g}"
        for name, is_off in (("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0))
        if sampling[name] not in (None, is_off, -1)
    ]
    suspects = []
    if sampling["temperature"] not in (None, 1.0):
        suspects.append(f"rollout.temperature is {sampling['temperature']:g}: engine and learner must both apply it")
    unknown = finite_values(run.history, "router/unknown_share")
    is_mixture = len(unknown) or (number_or_none(parallel.get("expert")) or 0) > 1
    if is_mixture and not (len(unknown) and unknown.max() <= MOST_UNKNOWN):
        suspects.append("the policy is a mixture, and the learner does not replay the engine's experts")
    facts = Facts(engine_dtype=dtypes[0], learner_dtype=dtypes[1], cuts=tuple(cuts), suspects=tuple(suspects))
    return replace(facts, failed_proofs=tuple(_failed_proofs(run, is_exact=facts.is_exact)))


def _failed_proofs(run: RunRecord, *, is_exact: bool) -> Iterator[str]:
    errors = [
        str(event.get("error", ""))[:500]
        for event in run.events
        if event["event"] == "weight_proof_failed" or "WeightProofError" in str(event.get("error", ""))
    ]
    if errors:
        yield f"the proof of a weight update failed {len(errors)} times{': ' * bool(errors[-1])}{errors[-1]}"
    bound = CANARY_EXACT if is_exact else CANARY_ROUNDED
    largest = float(finite_values(run.history, "weights/canary_max_diff").max(initial=0.0))
    if largest > bound:
        yield f"weights/canary_max_diff reached {largest:.2g} nats; up to {bound:g} is normal"


def finite_values(history: History, name: str) -> FloatColumn:
    """Return the finite values of a metric; empty if no step has one."""
    column = history.get(name)
    return column[np.isfinite(column)] if column is not None else np.zeros(0)
