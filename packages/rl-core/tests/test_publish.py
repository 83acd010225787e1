"""Publishing to correct engines, and to engines with one fault each."""

import asyncio
import dataclasses
import math
import time

import numpy as np
import pytest
import torch

from rl_core.data import ImageSpan
from rl_core.errors import DataError, NotReadyError, WeightProofError
from rl_core.weights.digests import probe_tensor, tensor_checksum
from rl_core.weights.publish import (
    BFLOAT16_TOLERANCES,
    REROUTED_TOLERANCES,
    ProofTolerances,
    check_canary,
    check_receipt,
    prove_canary,
    publish_weights,
)
from rl_core.weights.publish import (
    prove as prove_receipts,
)
from rl_core.weights.transports import TensorTransport
from rl_core.weights.update import AdapterUpdate, Canary, TokenScores, WeightReceipt, WeightUpdate

EXACT = ProofTolerances()
TIED = {"lm_head.weight": "embed.weight"}


@pytest.fixture(autouse=True, params=["crc32c", "sums"])
def checksum_kind(request, monkeypatch):
    """Run each test with the checksum for CPUs and the one for GPUs."""
    monkeypatch.setattr("rl_core.weights.digests._own_kind", lambda tensor: request.param)


class FakeEngine:
    """An engine that serves two tensors: an embedding, tied to the output head, and a scale."""

    def __init__(self):
        self.version = 0
        self.live = weights(seed=0)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        arrived = self.receive({name: tensor.clone() for name, tensor in update.location.tensors.items()})
        self.version = update.version
        self.live = {**self.live, **arrived, "lm_head.weight": arrived.get("embed.weight", self.live["embed.weight"])}
        self.corrupt()
        return self.receipt(arrived)

    def receive(self, tensors):
        """Return the tensors that arrive; subclasses lose or change some."""
        return tensors

    def corrupt(self):
        """Corrupt the loaded weights; subclasses define the fault."""

    def receipt(self, arrived):
        return WeightReceipt(
            version=self.version,
            arrived={name: tensor_checksum(tensor) for name, tensor in arrived.items()},
            live={name: probe_tensor(tensor) for name, tensor in self.live.items()},
        )

    async def score(self, sequences, *, with_experts):
        return [token_scores(sequence, score(self.live, sequence)) for sequence in sequences]


def weights(*, seed):
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(7, 4, generator=generator)
    scale = torch.rand(4, generator=generator) + 0.5
    return {"embed.weight": embedding, "norm.weight": scale, "lm_head.weight": embedding.clone()}


def token_scores(sequence, logprobs, routed_experts=None):
    return TokenScores(token_ids=sequence[:, None], logprobs=logprobs[:, None], routed_experts=routed_experts)


def score(tensors, sequence):
    """Return the logprobs of a bigram model."""
    hidden = tensors["embed.weight"][torch.as_tensor(sequence[:-1].astype(np.int64))] * tensors["norm.weight"]
    logprobs = torch.log_softmax(hidden @ tensors["lm_head.weight"].T, dim=-1)
    taken = logprobs.gather(1, torch.as_tensor(sequence[1:].astype(np.int64))[:, None])[:, 0]
    return np.concatenate([[0.0], taken.numpy()]).astype(np.float32)


def update_and_canary(*, seed=1, version=5):
    tensors = weights(seed=seed)
    sequences = [np.asarray([1, 2, 3], np.int32), np.asarray([4, 5, 6, 0], np.int32)]
    canary = Canary(sequences=sequences, logprobs=[score(tensors, sequence) for sequence in sequences])
    sent = {name: tensors[name] for name in ("embed.weight", "norm.weight")}
    return TensorTransport().pack(sent, version=version, tied=TIED), canary


def publish(*engines, tolerances=EXACT):
    update, canary = update_and_canary()
    return asyncio.run(publish_weights(update, engines, canary=canary, tolerances=tolerances))


def test_right_weights_pass_on_every_engine():
    started = time.perf_counter()
    report = publish(FakeEngine(), FakeEngine())
    whole_s = time.perf_counter() - started
    assert (report.version, report.num_tensors, report.size_bytes) == (5, 3, 4 * (7 * 4 + 4))
    assert report.fingerprint == update_and_canary()[0].fingerprint
    assert report.probe_max_diff == 0.0
    assert report.canary_max_diff < 1e-6
    assert 0 <= min(report.update_s, report.proof_s) <= report.update_s + report.proof_s <= whole_s
    assert (report.stall_s, report.drain_s, report.canary_scores) == (report.update_s, 0.0, ())


def test_the_tolerances_are_those_of_the_decision():
    """Decision 0004 names those of the probes; the health guide names that of the canary in bfloat16."""
    for found, *expected in (
        (EXACT, 1e-4, 1e-3, math.inf),
        (BFLOAT16_TOLERANCES, 3e-2, 0.3, math.inf),
        (REROUTED_TOLERANCES, 3e-2, math.inf, 0.2),
    ):
        assert [found.probe, found.canary, found.mean_canary] == expected


def receipt_of(live, **changes):
    """Return an update of zeros except for one tensor, and a receipt whose live probes are given."""
    sent = {"a": torch.tensor([0.25, 0.0]), "b": torch.tensor([4.0, -8.0]), "c": torch.zeros(2)}
    update = TensorTransport().pack(sent, version=5, tied={})
    probes = {name: np.array(live.get(name, tensor.numpy()), np.float32) for name, tensor in sent.items()}
    arrived = {name: digest.checksum for name, digest in update.digests.items()}
    return update, WeightReceipt(**{"version": 5, "arrived": arrived, "live": probes, **changes})


@pytest.mark.parametrize(
    ("live", "share"),
    [
        ({"a": [0.0, 0.0]}, 1.0),
        ({"b": [5.0, -6.0]}, 0.25),
        ({"c": [0.0, -0.5]}, 0.5),
        ({"a": [0.25, 0.125], "b": [4.0, -7.0]}, 0.5),
        ({"b": [4.0, -7.0], "c": [0.75, 0.0]}, 0.75),
        ({}, 0.0),
    ],
)
def test_a_probe_may_differ_by_the_tolerance_as_a_share_of_its_largest_value(live, share):
    update, receipt = receipt_of(live)
    assert check_receipt(update, receipt, tolerances=ProofTolerances(probe=share)) == share
    if share:
        with pytest.raises(WeightProofError, match=rf"differs by {share:g} of its largest value \(allowed"):
            check_receipt(update, receipt, tolerances=ProofTolerances(probe=np.nextafter(share, 0)))


def test_tensors_after_one_without_a_live_layer_are_compared():
    update, receipt = receipt_of({"a": [9.0, 9.0]}, unnamed=("a",))
    assert check_receipt(update, receipt, tolerances=EXACT) == 0.0
    update, receipt = receipt_of({"c": [9.0, 9.0]}, unnamed=("a", "b"))
    with pytest.raises(WeightProofError, match="'c' arrived, but"):
        check_receipt(update, receipt, tolerances=EXACT)


def test_a_proof_without_a_canary_compares_the_receipts_alone():
    update, receipt = receipt_of({"b": [4.0, -7.0]})
    proof = prove_receipts(
        update, [receipt], [None], canary=None, tolerances=ProofTolerances(probe=0.125), update_s=1.5
    )
    report = asyncio.run(proof)
    assert (report.probe_max_diff, report.canary_max_diff, report.canary_scores) == (0.125, 0.0, ())
    assert (report.update_s, report.stall_s, report.num_tensors) == (1.5, 1.5, 3)


class Asked(FakeEngine):
    """Records what it is asked to score."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def score(self, sequences, **options):
        self.asked.append(options)
        return await super().score(sequences, with_experts=options["with_experts"])


@pytest.mark.parametrize(
    ("canary", "mean_canary", "is_mixture", "is_asked"),
    [
        (math.inf, math.inf, False, False),
        (math.inf, math.inf, True, True),
        (math.inf, 1.0, False, True),
        (1.0, math.inf, False, True),
    ],
)
def test_a_canary_is_scored_unless_every_difference_is_allowed(canary, mean_canary, is_mixture, is_asked):
    engine, (update, given) = Asked(), update_and_canary()
    given = dataclasses.replace(given, logprobs=None) if is_mixture else given
    tolerances = ProofTolerances(canary=canary, mean_canary=mean_canary)
    report = asyncio.run(publish_weights(update, [engine], canary=given, tolerances=tolerances))
    assert engine.asked == [{"with_experts": is_mixture}] * is_asked
    assert len(report.canary_scores) == is_mixture


def test_engines_are_asked_for_images_and_an_adapter_of_another_name_only_if_there_are_any():
    update, canary = update_and_canary()
    images = ((ImageSpan(digest="a" * 64, start=0, length=1),), ())
    for name, given, asked in (
        ("policy", (), {}),
        ("other", (), {"adapter": "other"}),
        ("policy", images, {"images": images}),
    ):
        engine = Asked()
        named = dataclasses.replace(update, adapter=AdapterUpdate(rank=1, base={}, name=name))
        seen = dataclasses.replace(canary, images=given)
        asyncio.run(publish_weights(named, [engine], canary=seen, tolerances=EXACT))
        assert engine.asked == [{"with_experts": False, **asked}]


def test_a_report_carries_the_largest_differences():
    class Rounded(FakeEngine):
        def corrupt(self):
            self.live = {name: tensor.bfloat16().float() for name, tensor in self.live.items()}

    report = publish(FakeEngine(), Rounded(), FakeEngine(), tolerances=BFLOAT16_TOLERANCES)
    assert 1e-4 < report.probe_max_diff < 3e-2
    assert 1e-4 < report.canary_max_diff < 0.3
    with pytest.raises(WeightProofError, match=r"engine 1 of 3: tensor 'embed\.weight'") as caught:
        publish(FakeEngine(), Rounded(), FakeEngine())
    assert caught.value.tensor == "embed.weight"


def test_a_tensor_corrupted_on_its_way_is_named():
    class FlippedBit(FakeEngine):
        def receive(self, tensors):
            tensors["norm.weight"].view(torch.int32)[2] ^= 1
            return tensors

    with pytest.raises(WeightProofError, match=r"'norm\.weight' was changed in transit.*version 5") as caught:
        publish(FlippedBit())
    assert caught.value.tensor == "norm.weight"


def test_a_tensor_without_a_live_layer_must_arrive_and_give_the_learners_logprobs():
    class Joined(FakeEngine):
        def receipt(self, arrived):
            full = super().receipt(arrived)
            live = {name: probe for name, probe in full.live.items() if name != "norm.weight"}
            return dataclasses.replace(full, live=live, unnamed=("norm.weight",))

    class Lossy(Joined):
        def receive(self, tensors):
            return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}

    class Stale(Joined):
        def corrupt(self):
            self.live["norm.weight"] = weights(seed=0)["norm.weight"]

    assert publish(Joined()).canary_max_diff < 1e-6
    for engine, message in ((Lossy(), "'norm.weight' did not arrive"), (Stale(), "logprob of token")):
        with pytest.raises(WeightProofError, match=message):
            publish(engine)


def test_a_tensor_that_did_not_arrive_is_named():
    class Lossy(FakeEngine):
        def receive(self, tensors):
            return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}

    with pytest.raises(WeightProofError, match=r"'norm\.weight' did not arrive") as caught:
        publish(Lossy())
    assert caught.value.tensor == "norm.weight"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_learners_own_broken_tensor_is_named_and_nothing_is_sent(value):
    broken = weights(seed=1)
    broken["norm.weight"][1] = value
    sent = {name: broken[name] for name in ("embed.weight", "norm.weight")}
    _, canary = update_and_canary()
    engine = FakeEngine()
    update = TensorTransport().pack(sent, version=5, tied=TIED)
    with pytest.raises(WeightProofError, match=r"learner's own tensor 'norm\.weight' is not finite") as caught:
        asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=EXACT))
    assert caught.value.tensor == "norm.weight"
    assert engine.version == 0


def test_the_learners_own_broken_logprobs_are_not_blamed_on_an_engine():
    update, canary = update_and_canary()
    canary.logprobs[1][2] = math.nan
    engine = FakeEngine()
    with pytest.raises(WeightProofError, match="learner's own logprobs of canary sequence 1 are not finite") as found:
        asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=EXACT))
    assert str(found.value).count("canary sequence 1") == 1
    assert engine.version == 0


def test_a_tied_head_that_stays_stale_is_named():
    class StaleHead(FakeEngine):
        def corrupt(self):
            self.live["lm_head.weight"] = weights(seed=0)["lm_head.weight"]

    with pytest.raises(WeightProofError, match=r"'lm_head\.weight' arrived, but the engine serves") as caught:
        publish(StaleHead())
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_a_tensor_that_is_not_served_is_named(name):
    class Forgetful(FakeEngine):
        def receipt(self, arrived):
            receipt = super().receipt(arrived)
            return dataclasses.replace(receipt, live={key: receipt.live[key] for key in receipt.live if key != name})

    with pytest.raises(WeightProofError, match=f"'{name}' is missing in the engine's live weights") as caught:
        publish(Forgetful())
    assert caught.value.tensor == name


def test_a_tensor_of_another_shape_is_named():
    class Padded(FakeEngine):
        def corrupt(self):
            self.live["embed.weight"] = torch.nn.functional.pad(self.live["embed.weight"], (0, 0, 0, 1))

    with pytest.raises(WeightProofError, match=r"'embed\.weight' has a probe of shape \[8\].*expected \[7\]"):
        publish(Padded())


@pytest.mark.parametrize(
    ("value", "tolerance"), [(math.nan, 1e-4), (math.nan, math.inf), (math.inf, 1e-4), (-math.inf, 1e-4)]
)
def test_a_live_tensor_that_is_not_finite_never_passes(value, tolerance):
    class Broken(FakeEngine):
        def corrupt(self):
            self.live["norm.weight"][1] = value

    with pytest.raises(WeightProofError, match=r"norm\.weight"):
        publish(Broken(), tolerances=ProofTolerances(probe=tolerance, canary=math.inf))


def test_a_learner_that_is_not_finite_never_passes():
    for value in (math.nan, math.inf):
        update, _ = update_and_canary()
        digest = dataclasses.replace(update.digests["norm.weight"], probe=np.full(4, value, np.float32))
        broken = dataclasses.replace(update, digests={**update.digests, "norm.weight": digest})
        live = {name: d.probe for name, d in broken.digests.items()} | {"lm_head.weight": digest.probe}
        receipt = WeightReceipt(version=5, arrived={n: d.checksum for n, d in broken.digests.items()}, live=live)
        with pytest.raises(WeightProofError, match=r"norm\.weight"):
            check_receipt(broken, receipt, tolerances=EXACT)


def test_an_engine_of_another_version_is_refused():
    class Late(FakeEngine):
        def receipt(self, arrived):
            return dataclasses.replace(super().receipt(arrived), version=4)

    with pytest.raises(WeightProofError, match="serves version 4; version 5 was published") as caught:
        publish(Late())
    assert caught.value.tensor is None


def test_a_different_model_is_named_by_sequence_and_token():
    class OtherModel(FakeEngine):
        async def score(self, sequences, **options):
            scores = await super().score(sequences, **options)
            scores[1].logprobs[2] += 0.5
            return scores

    with pytest.raises(WeightProofError, match=r"token 2 of canary sequence 1 is .*rope") as caught:
        publish(OtherModel())
    assert caught.value.tensor is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("positions", [[2], [1, 2, 3]])
def test_canary_logprobs_that_are_not_finite_never_pass(value, positions):
    _, canary = update_and_canary()
    found = [row.copy() for row in canary.logprobs]
    found[1][positions] = value
    with pytest.raises(WeightProofError, match=f"token {positions[0]} of canary sequence 1"):
        check_canary(canary, found, tolerances=EXACT)
    image = (ImageSpan(digest="a" * 64, start=0, length=1),)
    seen = dataclasses.replace(
        canary, images=tuple(image if index == 1 else () for index in range(len(canary.sequences)))
    )
    with pytest.raises(WeightProofError, match="The sequence has an image: compare the image processors"):
        check_canary(seen, found, tolerances=EXACT)
    broken = Canary(sequences=canary.sequences, logprobs=found)
    for scores in (canary.logprobs, found):
        with pytest.raises(WeightProofError, match=f"token {positions[0]} of canary sequence 1"):
            check_canary(broken, scores, tolerances=EXACT)


def test_a_nan_among_larger_differences_is_the_one_named():
    _, canary = update_and_canary()
    found = [row.copy() for row in canary.logprobs]
    found[0][1], found[0][2] = found[0][1] + 9, math.nan
    with pytest.raises(WeightProofError, match="token 2 of canary sequence 0 is nan"):
        check_canary(canary, found, tolerances=EXACT)


def test_the_first_position_does_not_count():
    _, canary = update_and_canary()
    found = [row.copy() for row in canary.logprobs]
    found[0][0] = 7.0
    assert check_canary(canary, found, tolerances=EXACT) == 0.0


def test_the_mean_of_all_differences_is_compared_if_single_ones_may_be_large():
    _, canary = update_and_canary()
    found = [row.copy() for row in canary.logprobs]
    found[0][1] += 0.9  # a token at other experts
    count = sum(len(row) - 1 for row in found)
    assert check_canary(canary, found, tolerances=REROUTED_TOLERANCES) == pytest.approx(0.9, rel=1e-4)
    with pytest.raises(WeightProofError, match=r"by .* nats in the mean .*transformers engine"):
        check_canary(canary, found, tolerances=ProofTolerances(canary=math.inf, mean_canary=0.8 / count))
    with pytest.raises(WeightProofError, match=r"by 0\.4000 nats in the mean"):
        check_canary(canary, [row + 0.4 for row in canary.logprobs], tolerances=REROUTED_TOLERANCES)
    with pytest.raises(WeightProofError, match="nan"):
        check_canary(canary, [row * math.nan for row in found], tolerances=REROUTED_TOLERANCES)


def test_logprobs_may_differ_by_the_tolerances_and_the_largest_difference_is_reported():
    sequences = [np.zeros(3, np.int32), np.zeros(2, np.int32)]
    canary = Canary(sequences=sequences, logprobs=[np.float32([0, -1, -2]), np.float32([0, -3])])
    found = [np.float32([9, -1.5, -1.75]), np.float32([9, -2.625])]
    largest, mean = 0.5, (0.5 + 0.25 + 0.375) / 3
    for rows in (1, -1):
        swapped = Canary(sequences=sequences[::rows], logprobs=canary.logprobs[::rows])
        allowed = ProofTolerances(canary=largest, mean_canary=mean)
        assert check_canary(swapped, found[::rows], tolerances=allowed) == largest
    with pytest.raises(WeightProofError, match=r"token 1 of canary sequence 0 is -1\.5000; .* -1\.0000 \(allowed"):
        check_canary(canary, found, tolerances=ProofTolerances(canary=largest - 1e-6))
    with pytest.raises(WeightProofError, match=r"by 0\.3750 nats in the mean \(allowed 0\.375\)"):
        check_canary(canary, found, tolerances=ProofTolerances(canary=largest, mean_canary=np.nextafter(mean, 0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:1], "scored 1 canary sequences of 2"),
        (lambda rows: [rows[0], rows[1][:-1]], r"shape \[3\] for canary sequence 1; expected \[4\]"),
    ],
)
def test_scores_of_another_shape_are_refused(change, message):
    _, canary = update_and_canary()
    with pytest.raises(WeightProofError, match=message):
        check_canary(canary, change(list(canary.logprobs)), tolerances=EXACT)


def test_a_tied_name_needs_its_source():
    update, canary = update_and_canary()
    broken = dataclasses.replace(update, tied={"lm_head.weight": "embed_tokens.weight"})
    with pytest.raises(DataError, match=r"'lm_head\.weight' is tied to 'embed_tokens\.weight'"):
        asyncio.run(publish_weights(broken, [FakeEngine()], canary=canary, tolerances=EXACT))


def test_publishing_needs_an_engine():
    with pytest.raises(NotReadyError, match="version 5 cannot be published without an engine"):
        publish()


class RoutedEngine(FakeEngine):
    """A mixture of two experts, the second with twice the scale; it reports the expert of each token."""

    expert = 1

    async def score(self, sequences, *, with_experts):
        assert with_experts
        return [routed_scores(self.live, sequence, self.expert) for sequence in sequences]


def routed_scores(tensors, sequence, expert):
    scaled = {**tensors, "norm.weight": tensors["norm.weight"] * (1 + expert)}
    experts = np.full((len(sequence), 1, 1), expert, np.int16)
    return token_scores(sequence, score(scaled, sequence), experts)


def prove(*engines, learner=None, tolerances=EXACT):
    update, canary = update_and_canary()
    canary = dataclasses.replace(canary, logprobs=None)

    def score_as_told(sequences, experts):
        tensors = learner or weights(seed=1)
        pairs = zip(sequences, experts, strict=True)
        return [routed_scores(tensors, sequence, int(told[0, 0, 0])).token_logprobs for sequence, told in pairs]

    report = asyncio.run(publish_weights(update, engines, canary=canary, tolerances=tolerances))
    assert [len(scores) for scores in report.canary_scores] == [2] * len(engines)
    return prove_canary(canary, report, score_as_told, tolerances=tolerances)


def test_a_canary_of_a_mixture_is_scored_with_the_experts_of_each_engine():
    other = RoutedEngine()
    other.expert = 0
    report = prove(RoutedEngine(), other)
    assert report.canary_max_diff < 1e-6
    assert report.canary_scores == ()
    assert prove_canary(update_and_canary()[1], report, None, tolerances=EXACT) is report


def test_an_engine_whose_experts_compute_something_else_is_named():
    class OtherExpert(RoutedEngine):
        async def score(self, sequences, **options):
            said = await super().score(sequences, **options)
            return [dataclasses.replace(one, routed_experts=one.routed_experts * 0) for one in said]

    with pytest.raises(WeightProofError, match=r"engine 1 of 2: .*logprob of token \d of canary sequence 0"):
        prove(RoutedEngine(), OtherExpert())
    with pytest.raises(WeightProofError, match="nan"):
        prove(RoutedEngine(), learner={name: tensor * math.nan for name, tensor in weights(seed=1).items()})
