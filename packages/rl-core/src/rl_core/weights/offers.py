"""The shards that each rank of a learner offers to engines, and the update that combines all offers."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rl_core.errors import WeightProofError
from rl_core.record_fields import record
from rl_core.weights.rectangle_sums import RectangleDigest, digest_rectangles, join_digests
from rl_core.weights.sender import SenderOptions, WeightSender
from rl_core.weights.update import FromSenders, Rectangle, WeightSource, WeightUpdate


@record
class HeldRectangle:
    """A rectangle of a tensor, stored by one rank.

    Attributes:
        rectangle: Position and size.
        shape: Shape of the whole tensor.
        read: Returns its elements, contiguous; can be called repeatedly.
    """

    rectangle: Rectangle
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@record
class RankOffer:
    """The weights that one rank sends.

    Attributes:
        source: The sender and its rectangles.
        digests: Digest of each rectangle.
    """

    source: WeightSource
    digests: Sequence[RectangleDigest]


class RankSender:
    """A rank's sender, open from its first offer until it is closed."""

    def __init__(self, name: str) -> None:
        """Initialize without listening.

        Args:
            name: Name of the rank, for error messages.
        """
        self._name = name
        self._sender: WeightSender | None = None

    def offer(self, held: Sequence[HeldRectangle], options: SenderOptions, *, version: int) -> RankOffer:
        """Send these rectangles on request. They are read when sent, so they must not change until `withdraw`.

        Args:
            held: Rectangles in the order of the tensors.
            options: Options of the sender; only those of the first offer apply.
            version: Policy version.
        """
        if self._sender is None:
            self._sender = WeightSender(options)
        elif options.num_receivers is not None:
            self._sender.expect(options.num_receivers)
        self._sender.withdraw()
        digests = digest_rectangles((one.rectangle, one.shape, one.read()) for one in held)
        self._sender.offer(version, lambda: (one.read() for one in held))
        rectangles = [one.rectangle for one in held]
        source = WeightSource(sender=self._name, meeting=self._sender.meeting, rectangles=rectangles)
        return RankOffer(source=source, digests=digests)

    def expect(self, num_receivers: int) -> None:
        """See `WeightSender.expect`."""
        if self._sender is not None:
            self._sender.expect(num_receivers)

    def withdraw(self) -> None:
        """Stop sending before the rectangles change; waits for engines that are receiving."""
        if self._sender is not None:
            self._sender.withdraw()

    def close(self) -> None:
        """Disconnect from every engine. Can be called twice."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


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
