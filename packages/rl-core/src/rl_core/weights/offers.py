"""What each rank of a learner offers to engines, and the update that the offers of all ranks make."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from rl_core.errors import WeightProofError
from rl_core.record_fields import record
from rl_core.weights.rectangle_sums import RectangleDigest, digest_rectangles, join_digests
from rl_core.weights.sender import SenderOptions, WeightSender
from rl_core.weights.update import Rectangle, WeightSource, WeightUpdate


@record
class HeldRectangle:
    """A rectangle of a tensor, as a rank holds it.

    Attributes:
        rectangle: Which.
        shape: Of the whole tensor.
        read: Gives its elements, contiguous, of the rectangle's sizes; as often as it is called.
    """

    rectangle: Rectangle
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@record
class RankOffer:
    """What one rank sends.

    Attributes:
        source: Where to, and which rectangles.
        digests: Of each rectangle.
    """

    source: WeightSource
    digests: Sequence[RectangleDigest]


class RankSender:
    """A rank's sender, open from its first offer to its end."""

    def __init__(self, name: str) -> None:
        """Listen to nobody yet.

        Args:
            name: Of the rank, for messages.
        """
        self._name = name
        self._sender: WeightSender | None = None

    def offer(self, held: Sequence[HeldRectangle], options: SenderOptions, *, version: int) -> RankOffer:
        """Send these rectangles to who asks, read when they are sent: they must not change until `withdraw`.

        Args:
            held: In the order of the tensors.
            options: How; those of the first offer count.
            version: What they are.
        """
        if self._sender is None:
            self._sender = WeightSender(options)
        elif options.num_receivers is not None:
            self._sender.expect(options.num_receivers)
        self._sender.withdraw()
        digests = digest_rectangles((one.rectangle, one.shape, one.read()) for one in held)
        self._sender.offer(version, _Reading(held))
        rectangles = [one.rectangle for one in held]
        source = WeightSource(sender=self._name, meeting=self._sender.meeting, rectangles=rectangles)
        return RankOffer(source=source, digests=digests)

    def expect(self, num_receivers: int) -> None:
        """See `WeightSender.expect`."""
        if self._sender is not None:
            self._sender.expect(num_receivers)

    def withdraw(self) -> None:
        """Send nothing any more, before the rectangles change; waits for engines that take them."""
        if self._sender is not None:
            self._sender.withdraw()

    def close(self) -> None:
        """Leave every engine. Can be called twice."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


class _Reading:
    """The elements of rectangles, read anew by each who iterates."""

    def __init__(self, held: Sequence[HeldRectangle]) -> None:
        self._held = held

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (one.read() for one in self._held)


def join_offers(
    offers: Sequence[RankOffer], names: Iterable[str], *, version: int, tied: Mapping[str, str]
) -> WeightUpdate:
    """The update that engines take from all ranks.

    Args:
        offers: Of every rank.
        names: Of all tensors, in the order in which they are sent.
        version: What they are.
        tied: Names served from another tensor.

    Raises:
        WeightProofError: The rectangles of a tensor do not make it up; the message names it.
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
                f"the rectangles that the ranks offer must make up tensor {name!r}{whole} without gap or overlap; "
                f"found {found}. Nothing was published.",
                tensor=name,
            )
    digests = join_digests(parts)
    return WeightUpdate(
        version=version,
        digests={name: digests[name] for name in rectangles},
        sources=[offer.source for offer in offers if offer.source.rectangles],
        tied=dict(tied),
    )


def _make_up(rectangles: Sequence[Rectangle], shape: tuple[int, ...]) -> bool:
    """True where they lie within the tensor, have as many elements, and none of them twice."""
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
