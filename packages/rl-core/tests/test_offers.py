"""Weights from several senders, each with its own rectangles: assembly, proof, withdrawal, and lost senders."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from offered_weights import OfferedTo, held

from rl_core.errors import TransferError, WeightProofError, WeightsGoneError
from rl_core.weights.broadcast import (
    HeldRectangle,
    SenderOptions,
    WeightSender,
    join_offers,
    offer_from_rank,
)
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.update import FromSenders, Rectangle, WeightUpdate

CPU = torch.device("cpu")
OPTIONS = SenderOptions(bucket_bytes=100, deadline_s=60.0)
TENSORS = {
    "rows": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "columns": torch.linspace(-3, 3, 77).reshape(7, 11).to(torch.bfloat16),  # rows of 22 bytes, not whole words
    "norm": torch.linspace(0, 1, 9).to(torch.bfloat16),
    "whole": torch.arange(21, dtype=torch.float32).reshape(7, 3) - 10,
}
CUTS = {"rows": (5, 5), "columns": (7, 4), "norm": (4,), "whole": (7, 3)}
"""Row and column at which each tensor is cut; the tensor's end means no cut."""


def pieces(name: str, shape: Sequence[int], cut: Sequence[int]) -> list[Rectangle]:
    """Return the rectangles of a tensor that is cut once along each axis."""
    sides = [[(0, at), (at, size - at)] for size, at in zip(shape, cut, strict=True)]
    found = [Rectangle(name, *map(tuple, zip(*sides_of, strict=True))) for sides_of in itertools.product(*sides)]
    return [one for one in found if 0 not in one.sizes]


def shares(tensors: dict[str, torch.Tensor], num_ranks: int) -> list[list[HeldRectangle]]:
    """Distribute the tensors' rectangles over the ranks, round-robin."""
    ranks: list[list[HeldRectangle]] = [[] for _ in range(num_ranks)]
    turn = itertools.cycle(ranks)
    for name, tensor in tensors.items():
        for one in pieces(name, tensor.shape, CUTS[name]):
            next(turn).append(held(tensor, one))
    return ranks


class Ranks:
    """A learner with several ranks, in this process."""

    def __init__(self, tensors: dict[str, torch.Tensor], num_ranks: int, options: SenderOptions = OPTIONS) -> None:
        self.tensors, self.options = tensors, options
        self.senders = [WeightSender(f"rank {rank} of the learner") for rank in range(num_ranks)]

    def offer(self, version: int) -> WeightUpdate:
        parts = shares(self.tensors, len(self.senders))
        offers = [
            offer_from_rank(sender, part, self.options, version=version)
            for sender, part in zip(self.senders, parts, strict=True)
        ]
        return join_offers(offers, self.tensors, version=version, tied={})

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ranks(opened: ExitStack) -> Ranks:
    ranks = Ranks(dict(TENSORS), 3)
    opened.callback(ranks.close)
    return ranks


@pytest.fixture
def engine(opened: ExitStack) -> OfferedTo:
    engine = OfferedTo()
    opened.callback(engine.close)
    return engine


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rectangles_of_all_ranks_arrive_as_whole_tensors(num_ranks: int, bucket_bytes: int, opened: ExitStack) -> None:
    ranks = Ranks(dict(TENSORS), num_ranks, SenderOptions(bucket_bytes=bucket_bytes))
    engine = OfferedTo(num_workers=2)
    opened.callback(ranks.close)
    opened.callback(engine.close)
    for version in (1, 2):
        update = ranks.offer(version)
        for found in engine.take(update):
            assert list(found) == list(TENSORS)
            for name, tensor in TENSORS.items():
                assert torch.equal(found[name], tensor)
                assert tensor_checksum(found[name], "sums") == update.digests[name].checksum
        ranks.tensors = {name: tensor + 0 for name, tensor in TENSORS.items()}


def test_engines_take_an_offer_side_by_side_and_late(ranks: Ranks, opened: ExitStack) -> None:
    update, engines = ranks.offer(1), [OfferedTo() for _ in range(3)]
    found: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda one=one: found.extend(one.take(update))) for one in engines[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.extend(engines[2].take(update))
    for engine in engines:
        engine.close()
    assert [torch.equal(one["rows"], TENSORS["rows"]) for one in found] == [True] * 3


def test_all_workers_connect_again_when_one_has_lost_a_connection(opened: ExitStack) -> None:
    ranks, engine = Ranks(dict(TENSORS), 2), OfferedTo(num_workers=2)
    opened.callback(ranks.close)
    opened.callback(engine.close)
    update = ranks.offer(1)
    engine.take(update)
    engine.groups[1]._groups[1].hang_up()  # of the second worker to the second rank
    for found in engine.take(update):
        assert torch.equal(found["columns"], TENSORS["columns"])


@pytest.mark.parametrize("offsets", [None, (0, 0), (7, 0)], ids=["missing", "twice", "outside"])
def test_rectangles_that_do_not_make_up_a_tensor_are_named(offsets: tuple[int, int] | None, ranks: Ranks) -> None:
    parts = shares(ranks.tensors, 1)[0]
    wrong = replace(parts[1], rectangle=parts[1].rectangle._replace(offsets=offsets)) if offsets else None
    parts[1:2] = [] if wrong is None else [wrong]
    offer = offer_from_rank(ranks.senders[0], parts, OPTIONS, version=1)
    with pytest.raises(WeightProofError, match="cover tensor 'rows' of shape") as raised:
        join_offers([offer], ranks.tensors, version=1, tied={})
    assert raised.value.tensor == "rows"


def test_a_tensor_that_no_rank_offers_is_named(ranks: Ranks) -> None:
    offer = offer_from_rank(ranks.senders[0], [], OPTIONS, version=1)
    with pytest.raises(WeightProofError, match="cover tensor 'rows' without gap or overlap; found none"):
        join_offers([offer], ["rows"], version=1, tied={})


@pytest.mark.parametrize("fault", ["swapped places", "swapped contents", "a changed byte"])
def test_a_wrong_rectangle_changes_the_checksum_of_its_tensor_alone(
    fault: str, opened: ExitStack, engine: OfferedTo
) -> None:
    ranks = Ranks({"rows": TENSORS["rows"].clone(), "whole": TENSORS["whole"]}, 1)
    opened.callback(ranks.close)
    halves = pieces("rows", (12, 5), (6, 5))
    parts = [held(ranks.tensors["rows"], one) for one in halves] + shares({"whole": TENSORS["whole"]}, 1)[0]
    update = join_offers(
        [offer_from_rank(ranks.senders[0], parts, OPTIONS, version=1)], ranks.tensors, version=1, tied={}
    )
    (source,) = update.sources
    if fault == "swapped places":
        first, second = halves
        moved = [first._replace(offsets=second.offsets), second._replace(offsets=first.offsets)]
        wrong = replace(source, rectangles=[*moved, *source.rectangles[2:]])
        update = replace(update, location=FromSenders(sources=[wrong]))
    elif fault == "swapped contents":
        offer_from_rank(ranks.senders[0], [parts[1], parts[0], parts[2]], OPTIONS, version=1)
    else:
        ranks.tensors["rows"][7, 3] += 1e-3
    (found,) = engine.take(update)
    sums = {name: tensor_checksum(tensor, "sums") == update.digests[name].checksum for name, tensor in found.items()}
    assert sums == {"rows": False, "whole": True}


def test_what_is_withdrawn_is_refused_and_the_next_offer_arrives(ranks: Ranks, engine: OfferedTo) -> None:
    old = ranks.offer(1)
    engine.take(old)
    ranks.senders[2].withdraw()  # this rank takes its next step before the others
    with pytest.raises(
        WeightsGoneError, match=r"rank 2 of the learner: .* of version 1 were requested; the sender has none"
    ):
        engine.take(old)
    started = time.monotonic()
    for sender in ranks.senders:
        sender.withdraw()
    assert time.monotonic() - started < OPTIONS.deadline_s / 2  # no rank waits for an engine that another rank refused
    update = ranks.offer(2)
    for _ in range(2):  # twice, as after a failed proof
        (found,) = engine.take(update)
        assert torch.equal(found["columns"], TENSORS["columns"])
    with pytest.raises(
        WeightsGoneError, match=r"rank 0 of the learner: .* of version 1 were requested; the sender has version 2"
    ):
        engine.take(old)


def test_weights_that_change_wait_for_an_engine_that_is_under_way(opened: ExitStack, engine: OfferedTo) -> None:
    tensors = {"rows": TENSORS["rows"].clone(), "whole": TENSORS["whole"].clone()}
    ranks = Ranks(tensors, 1, SenderOptions(bucket_bytes=16))
    opened.callback(ranks.close)
    update = ranks.offer(1)

    def step() -> None:
        ranks.senders[0].withdraw()
        for tensor in ranks.tensors.values():
            tensor.fill_(-1)

    stepping = threading.Thread(target=step)

    def step_midway(name: str) -> None:
        if name == "rows":
            stepping.start()
            stepping.join(0.05)
            assert stepping.is_alive()

    (found,) = engine.take(update, each=step_midway)
    stepping.join()
    assert torch.equal(found["whole"], TENSORS["whole"])
    assert (ranks.tensors["whole"] == -1).all()


def test_an_engine_that_stops_midway_is_given_up_when_the_weights_change(opened: ExitStack, engine: OfferedTo) -> None:
    ranks = Ranks({"whole": torch.zeros(7, 3 * 2**20)}, 1, SenderOptions(deadline_s=1.0))
    opened.callback(ranks.close)
    update = ranks.offer(1)
    plan = engine.sources.announce(update)  # asks without receiving any tensor
    (sender,) = ranks.senders
    sender.withdraw()
    with pytest.raises(TransferError, match=r"rank 0 of the learner: .* could not be transferred"):
        list(engine.groups[0].receive(plan))


def test_who_waits_for_its_turn_has_no_deadline(opened: ExitStack, engine: OfferedTo) -> None:
    """The last rank sends its only tensor after the others have taken longer than the deadline."""
    deadline_s = 1.0
    ranks = Ranks(dict(TENSORS), 3, SenderOptions(bucket_bytes=16, deadline_s=deadline_s))
    opened.callback(ranks.close)
    parts = shares(ranks.tensors, 1)[0]
    offers = [
        offer_from_rank(sender, [part for part in parts if part.rectangle.name in names], ranks.options, version=1)
        for sender, names in zip(ranks.senders, [["rows", "columns"], ["norm"], ["whole"]], strict=True)
    ]
    update = join_offers(offers, ranks.tensors, version=1, tied={})
    waiting = threading.Event()
    (found,) = engine.take(update, each=lambda name: name != "norm" or waiting.wait(3 * deadline_s))
    assert torch.equal(found["whole"], TENSORS["whole"])


def test_a_rank_that_ends_midway_is_named(opened: ExitStack, engine: OfferedTo) -> None:
    ranks = Ranks(dict(TENSORS), 2, SenderOptions(bucket_bytes=16))
    opened.callback(ranks.close)
    update = ranks.offer(1)
    sender = ranks.senders[1]

    def end(name: str) -> None:
        if name == "rows":
            for known in sender._served:
                known.hang_up()

    with pytest.raises(TransferError, match=r"rank 1 of the learner: .*could not be transferred"):
        engine.take(update, each=end)
    started = time.monotonic()
    ranks.senders[0].withdraw()
    assert time.monotonic() - started < OPTIONS.deadline_s / 2  # the engine has disconnected from this rank too
    (found,) = engine.take(ranks.offer(2))
    assert torch.equal(found["whole"], TENSORS["whole"])


def test_a_rank_that_is_gone_is_named_and_the_others_are_told(opened: ExitStack, engine: OfferedTo) -> None:
    ranks = Ranks(dict(TENSORS), 3, SenderOptions(deadline_s=1.0))
    opened.callback(ranks.close)
    update = ranks.offer(1)
    ranks.senders[1].close()
    with pytest.raises(WeightsGoneError, match=r"rank 1 of the learner .* cannot be reached"):
        engine.take(update)
    ranks.senders[0].withdraw()
    ranks.senders[2].withdraw()
