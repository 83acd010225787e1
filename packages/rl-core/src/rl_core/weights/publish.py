"""Publish a policy version to engines, and prove that each of them serves it."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rl_core.data.records import ExpertArray, FloatArray, IntArray
from rl_core.errors import DataError, NotReadyError, WeightProofError
from rl_core.record_fields import record, settings_record
from rl_core.weights.update import (
    POLICY_ADAPTER,
    Canary,
    TokenScores,
    WeightReceipt,
    WeightReceiver,
    WeightUpdate,
)

Answer = TypeVar("Answer")


@settings_record
class ProofTolerances:
    """Maximum differences between engine and learner.

    Attributes:
        probe: Maximum difference of a probe, relative to its largest value.
        canary: Maximum difference of a canary logprob in nats.
        mean_canary: Maximum mean difference over all canary logprobs. inf here and in `canary` skips the canary.
    """

    probe: float = 1e-4
    canary: float = 1e-3
    mean_canary: float = math.inf


BFLOAT16_TOLERANCES = ProofTolerances(probe=3e-2, canary=0.3)
"""For engines in bfloat16, whose logprobs differ from float32 by up to about 0.1."""
REROUTED_TOLERANCES = ProofTolerances(probe=3e-2, canary=math.inf, mean_canary=0.2)
"""The same for mixtures without router replay: a token that goes to other experts may differ by any amount."""


@record
class PublishReport:
    """Cost and result of a publication.

    Attributes:
        version: Policy version that every engine now serves.
        fingerprint: See `WeightUpdate.fingerprint`.
        num_tensors: Number of compared tensors, including tied ones.
        probe_max_diff: Largest probe difference, relative to the probe's largest value.
        canary_max_diff: Largest canary difference in nats; 0 if none was compared, and until `prove_canary` runs.
        update_s: Seconds until the last engine had loaded the weights.
        proof_s: Seconds spent comparing.
        drain_s: Seconds until the last engine had finished running requests; 0 if requests continued.
        stall_s: Longest time without a new token in an engine because of the update, excluding drain_s and
            recomputation for requests that continue.
        canary_scores: Scores per engine that `prove_canary` must compare.
        size_bytes: See `WeightUpdate.size_bytes`.
    """

    version: int
    fingerprint: str
    num_tensors: int
    probe_max_diff: float
    canary_max_diff: float
    update_s: float
    proof_s: float
    drain_s: float = 0.0
    stall_s: float = 0.0
    canary_scores: tuple[Sequence[TokenScores], ...] = ()
    size_bytes: int = 0


DIFFERENT_MODELS = (
    "Engine and learner compute different models: compare their configurations (rope, norms, dtype) and their "
    "adapters. If the first update already differs, the engine does not compute this architecture as transformers "
    'does; use the transformers engine (rollout.engine = "transformers").'
)


def _of_images(canary: "Canary", index: int) -> str:
    if index >= len(canary.images) or not canary.images[index]:
        return ""
    return "The sequence has an image: compare the image processors of both folders, and the pixel values. "


async def publish_weights(
    update: WeightUpdate, receivers: Sequence[WeightReceiver], *, canary: Canary, tolerances: ProofTolerances
) -> PublishReport:
    """Send an update to every engine, and compare what each serves with what was sent.

    For a canary without logprobs, the report contains the engines' scores for `prove_canary`.

    Raises:
        NotReadyError: There is no engine.
        WeightProofError: An engine serves different weights; the message names the first tensor that differs. Or the
            learner's own weights are not finite, and nothing is sent.
    """
    if not receivers:
        raise NotReadyError(f"version {update.version} cannot be published without an engine. Start one first.")
    check_finite(update, canary)
    started = time.perf_counter()
    receipts = await asyncio.gather(*(receiver.update_weights(update) for receiver in receivers))
    update_s = time.perf_counter() - started
    return await prove(update, receipts, receivers, canary=canary, tolerances=tolerances, update_s=update_s)


async def prove(
    update: WeightUpdate,
    receipts: Sequence[WeightReceipt],
    receivers: Sequence[WeightReceiver],
    *,
    canary: Canary | None,
    tolerances: ProofTolerances,
    update_s: float,
) -> PublishReport:
    """Compare what each engine received and serves with what was sent; see `publish_weights`.

    Args:
        update: The update that the engines have loaded.
        receipts: Each engine's receipt.
        receivers: The engines, which score the canary.
        canary: Sequences for the proof; None compares only the receipts.
        tolerances: Maximum differences.
        update_s: Seconds until the last engine had loaded the weights, for the report.

    Raises:
        WeightProofError: An engine serves different weights; the message names the first tensor that differs.
    """
    started = time.perf_counter()
    probe_diff = _worst(receipts, lambda receipt: check_receipt(update, receipt, tolerances=tolerances))
    scores: Sequence[Sequence[TokenScores]] = ()
    canary_diff, is_routed = 0.0, canary is not None and canary.logprobs is None
    if canary is not None and (is_routed or math.isfinite(min(tolerances.canary, tolerances.mean_canary))):
        more: dict[str, Any] = {"images": canary.images} if canary.images else {}  # an engine may not know them
        if update.adapter is not None and update.adapter.name != POLICY_ADAPTER:
            more["adapter"] = update.adapter.name
        scoring = (receiver.score(canary.sequences, with_experts=is_routed, **more) for receiver in receivers)
        scores = await asyncio.gather(*scoring)
        if not is_routed:
            canary_diff = _worst(scores, lambda of_engine: _check_scores(canary, of_engine, tolerances))
    return PublishReport(
        version=update.version,
        fingerprint=update.fingerprint,
        num_tensors=len(update.served) + len(update.tied),
        probe_max_diff=probe_diff,
        canary_max_diff=canary_diff,
        update_s=update_s,
        proof_s=time.perf_counter() - started,
        stall_s=update_s,
        canary_scores=tuple(scores) if is_routed else (),
        size_bytes=update.size_bytes,
    )


def prove_canary(
    canary: Canary,
    report: PublishReport,
    score: Callable[[Sequence[IntArray], Sequence[ExpertArray | None]], Sequence[FloatArray]],
    *,
    tolerances: ProofTolerances,
) -> PublishReport:
    """Compare each engine's scores of a canary without logprobs with the learner's, which replays the engine's experts.

    Rounding decides between nearly equal experts in a mixture's router, so without replay engine and learner would
    differ by more than any useful tolerance. The learner must still have the published weights.

    Args:
        canary: The published canary.
        report: Report of its publication.
        score: Returns the learner's logprobs of sequences, given the engine's experts.
        tolerances: Maximum differences.

    Returns:
        The report with the largest difference; unchanged if nothing is left to compare.

    Raises:
        WeightProofError: A logprob differs by more than the tolerance.
    """

    def check(scores: Sequence[TokenScores]) -> float:
        logprobs = score(canary.sequences, [one.routed_experts for one in scores])
        scored = Canary(sequences=canary.sequences, logprobs=logprobs)
        return _check_scores(scored, scores, tolerances)

    if not report.canary_scores:
        return report
    return replace(report, canary_scores=(), canary_max_diff=_worst(report.canary_scores, check))


def check_receipt(update: WeightUpdate, receipt: WeightReceipt, *, tolerances: ProofTolerances) -> float:
    """Compare what arrived and what is live with what was sent.

    Returns:
        The largest probe difference, relative to that probe's largest value.

    Raises:
        WeightProofError: The version is wrong, the engine reports a problem, or a tensor is missing, changed or not
            live.
        DataError: A tied name has a source that was not sent.
    """
    if receipt.version != update.version:
        raise WeightProofError(f"the engine serves version {receipt.version}; version {update.version} was published.")
    _check_arrived(update, receipt.arrived)
    if receipt.problems:
        raise WeightProofError(f"the engine reports for version {update.version}: {' '.join(receipt.problems)}")
    worst = 0.0
    for name, probe in _expected_probes(update).items():
        if name in receipt.unnamed:
            continue
        live = receipt.live.get(name)
        if live is None:
            raise WeightProofError(f"tensor {name!r} is missing in the engine's live weights.", tensor=name)
        share = _difference(name, probe, live)
        if not share <= tolerances.probe:
            if update.adapter is not None and name not in update.digests:
                raise WeightProofError(
                    f"base tensor {name!r} is not the one on which the adapter of version {update.version} was "
                    f"trained: its probe differs by {share:.2g} of its largest value (allowed {tolerances.probe:g}). "
                    "The engine changed it, or was started from another model folder than the learner.",
                    tensor=name,
                )
            found = f"its probe differs by {share:.2g} of its largest value (allowed {tolerances.probe:g})"
            if np.isnan(share):
                found = "it was read back with different bits, or its expert computes something else, or NaN,"
            raise WeightProofError(
                f"tensor {name!r} arrived, but the engine serves something else: {found} at version "
                f"{update.version}. The engine kept an older copy of this tensor, or loaded it incorrectly; its "
                "rollouts would silently be off-policy.",
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
    if len(scores) != len(canary.sequences):
        raise WeightProofError(f"the engine scored {len(scores)} canary sequences of {len(canary.sequences)}.")
    worst, total, count = 0.0, 0.0, 0
    for index, (expected, found) in enumerate(zip(canary.logprobs or (), scores, strict=True)):
        if expected.shape != found.shape:
            raise WeightProofError(
                f"the engine returned logprobs of shape {list(found.shape)} for canary sequence {index}; expected "
                f"{list(expected.shape)}."
            )
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, which fails every comparison
            differences = np.abs(expected[1:] - found[1:])
        if not (differences <= tolerances.canary).all():
            position = int(np.argmax(differences)) + 1  # the first NaN, if any
            raise WeightProofError(
                f"every tensor arrived and is live, but the engine's logprob of token {position} of canary sequence "
                f"{index} is {found[position]:.4f}; the learner's is {expected[position]:.4f} (allowed difference "
                f"{tolerances.canary:g}). {_of_images(canary, index)}{DIFFERENT_MODELS}"
            )
        worst = max(worst, float(differences.max()))
        total, count = total + float(differences.sum()), count + len(differences)
    if not total / count <= tolerances.mean_canary:
        raise WeightProofError(
            f"every tensor arrived and is live, but the engine's logprobs of the canary differ from the learner's by "
            f"{total / count:.4f} nats in the mean (allowed {tolerances.mean_canary:g}). {DIFFERENT_MODELS}"
        )
    return worst


def check_finite(update: WeightUpdate, canary: Canary) -> None:
    """Refuse weights that are not finite, so that no engine is blamed for them.

    Raises:
        WeightProofError: A tensor's probe, or a logprob of the canary, is not finite.
    """
    for name, digest in update.served.items():
        if not np.isfinite(digest.probe).all():
            raise WeightProofError(
                f"the learner's own tensor {name!r} is not finite at version {update.version}; nothing was published. "
                "Resume from the last checkpoint; a lower learning rate or clip_grad may prevent it.",
                tensor=name,
            )
    for index, logprobs in enumerate(canary.logprobs or ()):
        if not np.isfinite(logprobs).all():
            raise WeightProofError(
                f"the learner's own logprobs of canary sequence {index} are not finite at version {update.version}, "
                "although its weights are; nothing was published. Its forward pass overflows: compute in float32."
            )


def _check_scores(canary: Canary, scores: Sequence[TokenScores], tolerances: ProofTolerances) -> float:
    return check_canary(canary, [one.token_logprobs for one in scores], tolerances=tolerances)


def _worst(answers: Sequence[Answer], check: Callable[[Answer], float]) -> float:
    """Return the largest difference over the checks of all engines' answers; a failed check names its engine."""
    worst = 0.0
    for index, answer in enumerate(answers):
        try:
            worst = max(worst, check(answer))
        except WeightProofError as error:
            if len(answers) == 1:
                raise
            raise WeightProofError(f"engine {index} of {len(answers)}: {error}", tensor=error.tensor) from None
    return worst


def _expected_probes(update: WeightUpdate) -> dict[str, FloatArray]:
    probes = {name: digest.probe for name, digest in update.served.items()}
    for name, source in update.tied.items():
        if source not in probes:
            raise DataError(f"{name!r} is tied to {source!r}, which was not sent.")
        probes[name] = probes[source]
    return probes


def _check_arrived(update: WeightUpdate, arrived: Mapping[str, str]) -> None:
    for name, digest in update.digests.items():
        if name not in arrived:
            raise WeightProofError(f"tensor {name!r} did not arrive at the engine.", tensor=name)
        if arrived[name] != digest.checksum:
            raise WeightProofError(
                f"tensor {name!r} was changed in transit to the engine: {digest.checksum} was sent, {arrived[name]} "
                f"arrived, at version {update.version}.",
                tensor=name,
            )


def _difference(name: str, expected: FloatArray, live: FloatArray) -> float:
    if expected.shape != live.shape:
        raise WeightProofError(
            f"tensor {name!r} has a probe of shape {list(live.shape)} in the engine; expected {list(expected.shape)}.",
            tensor=name,
        )
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, which fails every comparison
        return float(np.abs(expected - live).max(initial=0.0)) / scale
