"""Proof that the trained tokens are the tokens that the engine sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rl_core.data import NO_VERSION, BoolArray, ExpertArray, FloatArray, ImageSpan, IntArray, Trajectory
from rl_core.errors import DataError, EngineError
from rl_core.record_fields import UnitFloat, settings_record
from rl_core.weights import BFLOAT16_TOLERANCES
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine

NO_TOKENS = np.zeros(0, np.int32)


@settings_record
class AuditOptions:
    """Share of sessions to audit.

    Attributes:
        share: Share of sessions whose tokens are audited, from 0 to 1. The seed, prompt and session determine the
            choice, never the result.
        rescored_share: Share of sessions, from 0 to 1, that the engine also scores again; see `ScoreAudit`.
        rescored_tolerance: Maximum mean difference of a turn's logprobs, in nats, in a session that is scored again;
            above it, the session fails. In bfloat16, 0.003 is usual; in float32, it is below 1e-5, and 0.01 detects one
            changed token.
        seed: Seed of the choice.
    """

    share: UnitFloat = 1.0
    rescored_share: UnitFloat = 0.02
    rescored_tolerance: float = BFLOAT16_TOLERANCES.canary
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """The tokens that the engine sampled for one request.

    Attributes:
        input_ids: [P] int32, the context of the request.
        token_ids: [R] int32, the sampled tokens.
        logprobs: [R] float32.
        policy_versions: [R] int32.
        routed_experts: [P + R, layers, top_k] int16; None if the engine did not report experts.
        nucleus_ids: [R, K] int32; None if the request did not ask for them.
        images: Images in the context, as the request named them.
        pixel_digest: Digest of the pixel values that the engine used for them; empty without images.
    """

    input_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    policy_versions: IntArray
    routed_experts: ExpertArray | None = None
    nucleus_ids: IntArray | None = None
    images: tuple[ImageSpan, ...] = ()
    pixel_digest: str = ""

    @classmethod
    def of(cls, input_ids: IntArray, generation: Generation, *, images: tuple[ImageSpan, ...] = ()) -> "SampledSpan":
        """Copy the generation's arrays, so that later changes to the generation do not reach the span."""
        return cls(
            input_ids=input_ids,
            token_ids=np.array(generation.token_ids),
            logprobs=np.array(generation.logprobs),
            policy_versions=np.array(generation.policy_versions),
            routed_experts=None if generation.routed_experts is None else np.array(generation.routed_experts),
            nucleus_ids=None if generation.nucleus_ids is None else np.array(generation.nucleus_ids),
            images=images,
            pixel_digest=generation.pixel_digest,
        )


class RecordingEngine:
    """An engine that records the tokens it samples. All attributes except `generate` are those of the wrapped engine.

    Requests that continue one another share one copy of their tokens, so a session's context is stored once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        """Wrap an engine."""
        self._engine = engine
        self._contexts: list[IntArray] = []
        # Index of the context, its number of tokens, and the span without them.
        self._sampled: list[tuple[int, int, SampledSpan]] = []

    @property
    def as_engine(self) -> RolloutEngine:
        """Return this object, typed as the wrapped engine."""
        return cast(RolloutEngine, self)

    @property
    def spans(self) -> list[SampledSpan]:
        """Return the recorded spans, one per request."""
        return [replace(span, input_ids=self._contexts[index][:size]) for index, size, span in self._sampled]

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        index, size = self._context_of(request.input_ids), len(request.input_ids)
        generations = await self._engine.generate(request)
        self._sampled += [
            (index, size, SampledSpan.of(NO_TOKENS, generation, images=request.images)) for generation in generations
        ]
        return generations

    def _context_of(self, input_ids: IntArray) -> int:
        """Return the stored context that begins with these tokens. They replace a context that they continue."""
        for index, context in enumerate(self._contexts):
            size = min(len(context), len(input_ids))
            if size and context[size - 1] == input_ids[size - 1] and np.array_equal(context[:size], input_ids[:size]):
                if len(input_ids) > size:
                    self._contexts[index] = np.array(input_ids)
                return index
        self._contexts.append(np.array(input_ids))
        return len(self._contexts) - 1

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped engine."""
        return getattr(self._engine, name)


def audit_session(
    trajectories: Sequence[Trajectory],
    spans: Sequence[SampledSpan],
    *,
    group: Sequence[Trajectory] = (),
    images: EngineImages | None = None,
) -> None:
    """Prove every trajectory of a session with its experts and images, and that the session trains no token twice.

    If a session has several trajectories, each sampled token trains in one of them and is masked in the others. Two
    trajectories may train equal tokens after equal contexts only if the engine sampled them that often. Sessions may
    share a context that was sampled once.

    Args:
        trajectories: All trajectories of one session.
        spans: The engine's outputs for the prompt's sessions, in any order.
        group: All trajectories of the prompt's sessions, including these. They may use the same spans.
        images: The learner's side of the images; see `audit_images`. None does not audit them.

    Raises:
        DataError: A token breaks a rule. The message names its trajectory and position.
    """
    for trajectory in trajectories:
        audit_trajectory(trajectory, spans)
        audit_experts(trajectory, spans)
        if images is not None:
            audit_images(trajectory, spans, images)
    for index, trajectory in enumerate(trajectories[1:], start=1):
        _check_once(trajectory, earlier=trajectories[:index], spans=spans, group=group or trajectories)


def audit_trajectory(trajectory: Trajectory, spans: Sequence[SampledSpan]) -> None:
    """Prove that each trained token was sampled right after exactly the tokens that precede it.

    A span proves a trained token at position t under two conditions. Its input_ids and first sampled tokens equal the
    trajectory's tokens 0..t, and it sampled that token with exactly this logprob, version and nucleus. This finds
    tokens that were tokenized again, contexts changed after sampling, moved masks and edited logprobs. Masked tokens
    may have any id, but have no logprob and no version.

    Args:
        trajectory: A trajectory that a loop returned.
        spans: The engine's outputs for the prompt's sessions, in any order.

    Raises:
        DataError: A token breaks a rule. The message names its position.
    """
    mask = trajectory.loss_mask
    untouched = (trajectory.rollout_logprobs == 0) & (trajectory.policy_versions == NO_VERSION)
    for position in np.flatnonzero(~mask & ~untouched)[:1]:
        raise DataError(
            f"{_name(trajectory)}: token {position} is masked, so its logprob must be 0 and its version {NO_VERSION}; "
            f"found {trajectory.rollout_logprobs[position]} and {trajectory.policy_versions[position]}."
        )
    unproven = mask.copy()
    num_unproven = int(mask.sum())
    for span in _own_first(trajectory, spans):
        if not num_unproven:
            return
        if _prove(trajectory, span, unproven):
            num_unproven = int(unproven.sum())
    if num_unproven:
        raise DataError(_explanation(trajectory, spans, position=int(np.flatnonzero(unproven)[0])))


def audit_experts(trajectory: Trajectory, spans: Sequence[SampledSpan]) -> None:
    """Prove that a trajectory's routed experts are those that the engine used.

    The row before a trained token must equal the row of a span that sampled this token with its logprob and version.
    Other rows, such as those of a prompt or a tool's reply, must equal the row of some span whose input begins the
    trajectory. A row that no such span reports must be -1. Rows from the last trained token on are ignored, because no
    trained token depends on them.

    Args:
        trajectory: A trajectory that a loop returned, with proven tokens.
        spans: The engine's outputs for the prompt's sessions, in any order.

    Raises:
        DataError: A row differs. The message names its trajectory, token and layer.
    """
    num_rows = int(np.flatnonzero(trajectory.loss_mask).max(initial=0))
    told = [(experts, span) for span in _own_first(trajectory, spans) if (experts := span.routed_experts) is not None]
    given = trajectory.routed_experts
    if not num_rows or (given is None and not told):
        return
    given = np.full((num_rows, *told[0][0].shape[1:]), -1, np.int16) if given is None else given[:num_rows]
    expected, is_right = np.full_like(given, -1), np.zeros(num_rows, dtype=np.bool_)
    is_sampled = trajectory.loss_mask[1 : num_rows + 1]  # where only the request that sampled the next token decides
    for _ in range(2):  # again for rows that no such request reported
        for experts, span in told:
            if given.shape[1:] != experts.shape[1:]:
                raise DataError(
                    f"{_name(trajectory)}: routed_experts has {list(given.shape[1:])} (layers, top_k) per token; the "
                    f"engine reported {list(experts.shape[1:])}."
                )
            known, sampled = _told(trajectory, span, num_rows)
            rows = np.flatnonzero(np.where(is_sampled, sampled, known) & ~is_right)
            first = rows[(expected[rows] < 0).all(axis=(1, 2))]
            expected[first] = experts[first]
            is_right[rows] = (given[rows] == experts[rows]).all(axis=(1, 2))
            if is_right.all():
                return
        is_sampled = is_sampled & ~(expected < 0).all(axis=(1, 2))
    for position, layer in np.argwhere((given != expected).any(axis=2) & ~is_right[:, None])[:1]:
        raise DataError(
            f"{_name(trajectory)}: token {position} ({trajectory.input_ids[position]}) has experts "
            f"{given[position, layer].tolist()} in layer {layer}, but the engine used "
            f"{expected[position, layer].tolist()} (-1: not reported). Keep each row of Generation.routed_experts at "
            "its token; for a token computed several times, keep the first row."
        )


def audit_images(trajectory: Trajectory, spans: Sequence[SampledSpan], images: EngineImages) -> None:
    """Prove that the engine saw a trajectory's images, with the pixel values that the learner computes.

    Each image lies among the tokens, has as many placeholders as its size needs, and is in the run's store. No other
    token that the policy did not sample is a placeholder. Each trained token was sampled by a request with exactly the
    trajectory's images up to there, and the engine's digest of its pixel values is that of this process.

    Args:
        trajectory: A trajectory that a loop returned, with proven tokens.
        spans: The engine's outputs for the prompt's sessions, in any order.
        images: The run's images, as the learner's processor reads them.

    Raises:
        DataError: An image breaks a rule. The message names the trajectory and the image.
    """
    _check_placed(trajectory, images)
    is_open = is_stray(trajectory, images.token_id)
    for span in spans if is_open.any() else ():
        is_open[len(span.input_ids) : _agreement(trajectory, span)] = False
    for position in np.flatnonzero(is_open)[:1]:
        raise DataError(
            f"{_name(trajectory)}: token {position} is a placeholder of an image, but no image of the trajectory lies "
            "there: an image is missing. Keep the images of each part of a session with its tokens."
        )
    if not trajectory.images and not any(span.images for span in spans):
        return
    unproven, faults = trajectory.loss_mask.copy(), []
    for span in _own_first(trajectory, spans):
        rest = unproven.copy()
        if not _prove(trajectory, span, rest) or np.array_equal(rest, unproven):
            continue
        fault = _image_fault(trajectory, span, images)
        if fault is None:
            unproven = rest
        else:
            faults.append(fault)
    if unproven.any() and faults:
        raise DataError(f"{_name(trajectory)}: {faults[0]}")


def is_stray(trajectory: Trajectory, token_id: int) -> BoolArray:
    """Return [T] True for the placeholders of images that belong to none of the trajectory's images."""
    found: BoolArray = trajectory.input_ids == token_id
    for image in trajectory.images:
        found[image.start : image.start + image.length] = False
    return found


def _image_fault(trajectory: Trajectory, span: SampledSpan, images: EngineImages) -> str | None:
    """Describe how the images of a request differ from the trajectory's; None if they do not."""
    expected = tuple(one for one in trajectory.images if one.start < len(span.input_ids))
    mine, sent = [one.digest for one in expected], [one.digest for one in span.images]
    where = f"the request with {len(span.input_ids)} input tokens"
    for index, image in enumerate(expected):
        if sorted(mine) == sorted(sent) and mine[index] != sent[index]:
            return f"image {index} ({image.digest[:12]}) is swapped: {where} had {sent[index][:12]} in its place."
        if len(sent) < len(mine) and (index >= len(sent) or mine[index] != sent[index]):
            return f"image {index} ({image.digest[:12]}) at token {image.start} is missing in {where}."
        if mine[index] != sent[index]:
            return f"image {index} is {image.digest[:12]}, but {where} had {sent[index][:12]} in its place."
        if image != (other := span.images[index]):
            return (
                f"image {index} has {image.length} tokens from {image.start} on, but {where} had {other.length} from "
                f"{other.start} on."
            )
    if len(sent) > len(mine):
        return f"{where} had image {len(mine)} ({sent[len(mine)][:12]}), which is missing in the trajectory."
    _, digest = images.placed(span.input_ids, expected)
    if span.pixel_digest != digest:
        return (
            f"the engine computed {where} with other pixel values (digest {span.pixel_digest[:12] or 'none'}) than the "
            f"learner has for its {len(mine)} images ({digest[:12]})."
        )
    return None


def _check_placed(trajectory: Trajectory, images: EngineImages) -> None:
    """Check that a trajectory's images lie among its tokens and are in the store."""
    try:
        images.placed(trajectory.input_ids, trajectory.images)
    except EngineError as error:
        raise DataError(f"{_name(trajectory)}: {error}") from error


def _own_first(trajectory: Trajectory, spans: Sequence[SampledSpan]) -> Sequence[SampledSpan]:
    """Order the spans so that the trajectory's own span comes first, if each session made one request."""
    first = trajectory.session_index % len(spans) if spans else 0
    return (*spans[first:], *spans[:first])


def _told(trajectory: Trajectory, span: SampledSpan, num_rows: int) -> tuple[BoolArray, BoolArray]:
    """Return two [num_rows] bool arrays: rows that the span reports, and rows whose next token it sampled."""
    known, unproven = np.zeros(num_rows, dtype=np.bool_), np.ones(len(trajectory.input_ids), dtype=np.bool_)
    if span.routed_experts is not None and _prove(trajectory, span, unproven):
        size = min(_agreement(trajectory, span), num_rows)
        known[:size] = (span.routed_experts[:size] >= 0).any(axis=(1, 2))
    return known, known & ~unproven[1 : num_rows + 1] & trajectory.loss_mask[1 : num_rows + 1]


def _prove(trajectory: Trajectory, span: SampledSpan, unproven: BoolArray) -> bool:
    """Clear the positions that the span proves. Return False if it proves none."""
    start, num_tokens = len(span.input_ids), len(trajectory.input_ids)
    if not 0 < start < num_tokens or trajectory.input_ids[start - 1] != span.input_ids[-1] or not len(span.token_ids):
        return False  # most spans of other sessions end here
    if not np.array_equal(trajectory.input_ids[:start], span.input_ids):
        return False
    stop = min(num_tokens, start + len(span.token_ids))
    size = stop - start
    is_same = trajectory.input_ids[start:stop] == span.token_ids[:size]
    num_same = size if is_same.all() else int(np.argmin(is_same))
    stop = start + num_same
    proven = trajectory.rollout_logprobs[start:stop] == span.logprobs[:num_same]  # False for NaN
    proven &= trajectory.policy_versions[start:stop] == span.policy_versions[:num_same]
    mine, drawn_from = trajectory.nucleus_ids, span.nucleus_ids
    if mine is not None and drawn_from is not None:
        proven &= (mine[start:stop] == drawn_from[:num_same]).all(axis=1)
    elif mine is not None or drawn_from is not None:
        proven[:] = False
    unproven[start:stop] &= ~proven
    return True


def _check_once(
    trajectory: Trajectory,
    *,
    earlier: Sequence[Trajectory],
    spans: Sequence[SampledSpan],
    group: Sequence[Trajectory],
) -> None:
    """Refuse a token that an earlier trajectory of the session trains too, unless the engine sampled it for both."""
    trained_before = np.sum([_trains_too(trajectory, other) for other in earlier], axis=0)
    if not trained_before.any():
        return
    num_trained = np.sum([_trains_too(trajectory, other) for other in group], axis=0)
    num_sampled = np.sum([_samples(trajectory, span) for span in spans], axis=0)
    for position in np.flatnonzero((trained_before > 0) & (num_trained > num_sampled))[:1]:
        first = next(other for other in earlier if _trains_too(trajectory, other)[position])
        raise DataError(
            f"{_name(trajectory)}: token {position} ({trajectory.input_ids[position]}) is also trained by output "
            f"{first.output_index} of its session, but was sampled only once. Train it in one of them, and mask it in "
            "the other."
        )


def _trains_too(trajectory: Trajectory, other: Trajectory) -> BoolArray:
    """Return [T] bool: tokens that both trajectories train after the same tokens, with the same logprob and version."""
    size = min(len(trajectory.input_ids), len(other.input_ids))
    is_shared = np.zeros(len(trajectory.input_ids), dtype=np.bool_)
    is_shared[:size] = trajectory.loss_mask[:size] & other.loss_mask[:size]
    if not is_shared.any():
        return is_shared
    is_same = trajectory.input_ids[:size] == other.input_ids[:size]
    is_shared[:size] &= np.logical_and.accumulate(is_same)
    is_shared[:size] &= trajectory.rollout_logprobs[:size] == other.rollout_logprobs[:size]
    is_shared[:size] &= trajectory.policy_versions[:size] == other.policy_versions[:size]
    return is_shared


def _samples(trajectory: Trajectory, span: SampledSpan) -> BoolArray:
    """Return [T] bool: tokens that the span sampled after the same tokens, with the same logprob and version."""
    unproven = np.ones(len(trajectory.input_ids), dtype=np.bool_)
    _prove(trajectory, span, unproven)
    return ~unproven


def _explanation(trajectory: Trajectory, spans: Sequence[SampledSpan], *, position: int) -> str:
    """Explain why the first unproven token fails."""
    where = f"{_name(trajectory)}: token {position} ({trajectory.input_ids[position]}) is trained"
    advice = "Mask tokens that the policy did not sample, never tokenize a response again, and keep the sampled ids."
    if not spans:
        return f"{where}, but no request was sent to the engine. {advice}"
    agreements = [(_agreement(trajectory, span), len(span.input_ids)) for span in spans]
    if any(num_input <= position < num_agreeing for num_agreeing, num_input in agreements):
        what = "another logprob or policy version, or from another nucleus"
        return f"{where}, but the engine sampled it with {what}. {advice}"
    if any(position < num_agreeing for num_agreeing, _ in agreements):
        return f"{where}, but it was part of the input of the request, not sampled. {advice}"
    num_agreeing, num_input = max(agreements)
    return (
        f"{where}, but no request sampled it: the closest one, with {num_input} input tokens, matches the trajectory "
        f"up to token {num_agreeing}. {advice}"
    )


def _agreement(trajectory: Trajectory, span: SampledSpan) -> int:
    """Return the number of leading tokens of the trajectory that equal the request's and its response's."""
    asked = np.concatenate([span.input_ids, span.token_ids])
    size = min(len(asked), len(trajectory.input_ids))
    is_same = trajectory.input_ids[:size] == asked[:size]
    return size if is_same.all() else int(np.argmin(is_same))


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.prompt_uid}/{trajectory.session_index}/{trajectory.output_index}"
