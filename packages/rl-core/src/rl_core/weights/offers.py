"""The offers of a learner's ranks, each of its own shards, and the update that combines them."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from rl_core.errors import WeightProofError
from rl_core.record_fields import record
from rl_core.weights.rectangle_sums import RectangleDigest, digest_rectangles, join_digests
from rl_core.weights.sender import HeldRectangle, SenderOptions, WeightSender
from rl_core.weights.update import FromSenders, Rectangle, WeightSource, WeightUpdate


@record
class RankOffer:
    """The weights that one rank sends.

    Attributes:
        source: The sender and its rectangles.
        digests: Digest of each rectangle.
    """

    source: WeightSource
    digests: Sequence[RectangleDigest]


def offer_from_rank(
    sender: WeightSender, held: Sequence[HeldRectangle], options: SenderOptions, *, version: int
) -> RankOffer:
    """Let a rank send its rectangles on request, until `WeightSender.withdraw`.

    Args:
        sender: The rank's sender, which listens from its first offer.
        held: Rectangles in the order of the tensors.
        options: Options of the sender; only those of the first offer apply.
        version: Policy version.
    """
    sender.listen(options)
    sender.withdraw()
    digests = digest_rectangles((one.rectangle, one.shape, one.read()) for one in held)
    return RankOffer(source=sender.offer(held, version=version), digests=digests)


def join_offers(
    offers: Sequence[RankOffer], names: Iterable[str], *, version: int, tied: Mapping[str, str]
) -> WeightUpdate:
    """Combine the offers of all ranks into one update.

    Args:
        offers: Offers of every rank.
        names: Names of all tensors, in sending order.
        version: Policy version.
        tied: Names that are served from another tensor.

    Raises:
        WeightProofError: Rectangles do not cover a tensor exactly; the message names the tensor.
    """
    parts = [pair for offer in offers for pair in zip(offer.source.rectangles, offer.digests, strict=True)]
    shapes = {rectangle.name: digest.shape for rectangle, digest in parts}
    rectangles: dict[str, list[Rectangle]] = {name: [] for name in names}
    for rectangle, _ in parts:
        rectangles.setdefault(rectangle.name, []).append(rectangle)
    for name, of_tensor in rectangles.items():
        if name not in shapes or not _make_up(of_tensor, shapes[name]):
            found = ", ".join(f"{list(one.sizes)} at {list(one.offsets)}" for one in of_tensor) or "none"
            whole = f" of shape {list(shapes[name])}" if name in shapes else ""
            raise WeightProofError(
                f"the rectangles that the ranks offer must cover tensor {name!r}{whole} without gap or overlap; "
                f"found {found}. Nothing was published.",
                tensor=name,
            )
    digests = join_digests(parts)
    return WeightUpdate(
        version=version,
        digests={name: digests[name] for name in rectangles},
        location=FromSenders(sources=[offer.source for offer in offers if offer.source.rectangles]),
        tied=dict(tied),
    )


def _make_up(rectangles: Sequence[Rectangle], shape: tuple[int, ...]) -> bool:
    """Return True if the rectangles lie within the tensor and cover each element exactly once."""
    is_within = all(
        offset >= 0 and offset + size <= length
        for one in rectangles
        for offset, size, length in zip(one.offsets, one.sizes, shape, strict=True)
    )
    return (
        is_within
        and sum(math.prod(one.sizes) for one in rectangles) == math.prod(shape)
        and not any(itertools.starmap(_overlap, itertools.combinations(rectangles, 2)))
    )


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    axes = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(at < bt + bs and bt < at + as_ for at, as_, bt, bs in axes)
