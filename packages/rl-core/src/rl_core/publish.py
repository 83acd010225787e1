"""Publish a policy version to engines, and prove that each now serves it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.errors import WeightProofError
from rl_core.records import FloatArray
from rl_core.weights import Canary, WeightReceipt, WeightReceiver, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofTolerances:
    """How far an engine may be from the learner.

    Attributes:
        probe: Largest difference of a probe, as a share of that probe's largest value.
        canary: Largest difference of a canary logprob, in nats.
    """

    probe: float = 1e-4
    canary: float = 1e-3


BFLOAT16_TOLERANCES = ProofTolerances(probe=3e-2, canary=0.3)
"""For engines that serve in bfloat16, whose logprobs differ from float32 by up to about 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication cost and proved.

    Attributes:
        version: The version now served by every engine.
        num_tensors: Tensors compared, tied ones included.
        probe_max_diff: Largest probe difference, as a share of the probe's largest value.
        canary_max_diff: Largest canary difference in nats.
        update_s: Seconds until the last engine had taken the weights.
        proof_s: Seconds of the comparison.
    """

    version: int
    num_tensors: int
    probe_max_diff: float
    canary_max_diff: float
    update_s: float
    proof_s: float


async def publish_weights(
    update: WeightUpdate, receivers: Sequence[WeightReceiver], *, canary: Canary, tolerances: ProofTolerances
) -> PublishReport:
    """Give an update to every engine, and compare what each then serves with what was sent.

    Raises:
        WeightProofError: An engine serves something else; the message names the first tensor that differs.
    """
    started = time.perf_counter()
    receipts = await asyncio.gather(*(receiver.update_weights(update) for receiver in receivers))
    updated = time.perf_counter()
    probe_diff = max(check_receipt(update, receipt, tolerances=tolerances) for receipt in receipts)
    scores = await asyncio.gather(*(receiver.score(canary.sequences) for receiver in receivers))
    canary_diff = max(check_canary(canary, score, tolerances=tolerances) for score in scores)
    return PublishReport(
        version=update.version,
        num_tensors=len(update.digests) + len(update.tied),
        probe_max_diff=probe_diff,
        canary_max_diff=canary_diff,
        update_s=updated - started,
        proof_s=time.perf_counter() - updated,
    )


def check_receipt(update: WeightUpdate, receipt: WeightReceipt, *, tolerances: ProofTolerances) -> float:
    """Compare what arrived and what is live with what was sent.

    Returns:
        The largest probe difference, as a share of that probe's largest value.

    Raises:
        WeightProofError: Wrong version, or a tensor that is missing, changed on its way, or not live.
    """
    if receipt.version != update.version:
        raise WeightProofError(f"the engine serves version {receipt.version}; version {update.version} was published.")
    _check_arrived(update, receipt.arrived)
    worst = 0.0
    expected = {name: digest.probe for name, digest in update.digests.items()}
    expected.update({name: expected[source] for name, source in update.tied.items()})
    for name, probe in expected.items():
        live = receipt.live.get(name)
        if live is None:
            raise WeightProofError(f"tensor {name!r} is not among the engine's live weights.", tensor=name)
        share = _difference(name, probe, live)
        if not share <= tolerances.probe:
            raise WeightProofError(
                f"tensor {name!r} arrived, but the engine serves something else: its probe differs by {share:.2g} of "
                f"its largest value (allowed {tolerances.probe:g}) at version {update.version}. The engine kept an "
                "older copy of this tensor, or loaded it wrongly; its rollouts would be off policy without a sign.",
                tensor=name,
            )
        worst = max(worst, share)
    return worst


def check_canary(canary: Canary, scores: Sequence[FloatArray], *, tolerances: ProofTolerances) -> float:
    """Compare the engine's logprobs of the canary sequences with the learner's.

    Returns:
        The largest difference in nats.

    Raises:
        WeightProofError: A logprob differs by more than the tolerance.
    """
    worst = 0.0
    for index, (expected, found) in enumerate(zip(canary.logprobs, scores, strict=True)):
        difference = float(np.abs(expected[1:] - found[1:]).max())
        if not difference <= tolerances.canary:
            position = int(np.nanargmax(np.abs(expected[1:] - found[1:]))) + 1
            raise WeightProofError(
                f"every tensor arrived and is live, but the engine's logprob of token {position} of canary sequence "
                f"{index} is {found[position]:.4f}; the learner's is {expected[position]:.4f} (allowed difference "
                f"{tolerances.canary:g}). Engine and learner compute different models: compare their configurations "
                "(rope, norms, dtype)."
            )
        worst = max(worst, difference)
    return worst


def _check_arrived(update: WeightUpdate, arrived: Mapping[str, int]) -> None:
    for name, digest in update.digests.items():
        if name not in arrived:
            raise WeightProofError(f"tensor {name!r} did not arrive at the engine.", tensor=name)
        if arrived[name] != digest.crc32c:
            raise WeightProofError(
                f"tensor {name!r} was changed on its way to the engine: crc32c {digest.crc32c:08x} was sent, "
                f"{arrived[name]:08x} arrived, at version {update.version}.",
                tensor=name,
            )


def _difference(name: str, expected: FloatArray, live: FloatArray) -> float:
    if expected.shape != live.shape:
        raise WeightProofError(
            f"tensor {name!r} has a probe of shape {list(live.shape)} in the engine; expected {list(expected.shape)}.",
            tensor=name,
        )
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(expected - live).max(initial=0.0)) / scale
