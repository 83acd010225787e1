"""Publishes weights to engines of any kind, with proof, and optionally between whole responses."""

import time
from dataclasses import replace

from rl_core.errors import EngineError
from rl_core.weights import Canary, ProofTolerances, PublishReport, WeightUpdate, publish_weights
from rl_rollout.engines.gate import DRAIN_DEADLINE_S, Gate
from rl_rollout.engines.protocol import RolloutEngine


async def publish_to(
    engine: RolloutEngine,
    update: WeightUpdate,
    *,
    canary: Canary,
    tolerances: ProofTolerances,
    drain: bool = False,
    drain_deadline_s: float = DRAIN_DEADLINE_S,
) -> PublishReport:
    """Send an update to an engine, or to all replicas of one, and prove that each serves it.

    Args:
        engine: The engine.
        update: The update to serve.
        canary: Sequences for the proof.
        tolerances: Tolerances of the proof.
        drain: Let running requests finish with the current weights, and hold back new ones meanwhile. Every response
            then has one policy version. Otherwise, requests continue with the new weights.
        drain_deadline_s: Maximum seconds for running requests to end.

    Raises:
        WeightProofError: An engine serves different weights. The message names the first tensor that differs.
        EngineDiedError: No engine is left.
        EngineError: The engine cannot hold back requests, so it cannot drain.
        DeadlineError: Requests did not end in time.
    """
    publish = getattr(engine, "publish", None)
    if publish is not None:
        report: PublishReport = await publish(
            update, canary=canary, tolerances=tolerances, drain=drain, drain_deadline_s=drain_deadline_s
        )
        return report
    if not drain:
        return await publish_weights(update, [engine], canary=canary, tolerances=tolerances)
    gate = getattr(engine, "gate", None)
    if not isinstance(gate, Gate):
        raise EngineError(
            f"{engine.traits.name} cannot hold requests back. Wrap it in ReplicatedEngine([engine]), or publish "
            "without drain."
        )
    began_at = time.perf_counter()
    async with gate.drained(drain_deadline_s):
        drain_s = time.perf_counter() - began_at
        report = await publish_weights(update, [engine], canary=canary, tolerances=tolerances)
    return replace(report, drain_s=drain_s, stall_s=report.update_s + report.proof_s)
