"""Proof of the weights that an engine loads from its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from rl_core.data import FloatArray
from rl_core.errors import WeightProofError
from rl_core.weights import probe_tensor
from rl_rollout.engines.vllm.round_trip import prove_round_trip
from rl_rollout.engines.weight_checks import (
    EMBEDDING,
    HEAD,
    LiveNames,
    Shapes,
    check_first_weights,
    folder_probes,
    require_explained,
    tensor_shapes,
)

NORM = "model.norm.weight"


def folder_of(folder: Path, *, is_tied: bool, with_head: bool) -> Path:
    generator = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (5, 3), NORM: (3,)} | ({HEAD: (5, 3)} if with_head else {})
    save_file({name: torch.randn(s, generator=generator) for name, s in shapes.items()}, folder / "a.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    return folder


@pytest.mark.parametrize(
    ("is_tied", "with_head", "is_embedding"),
    [(True, False, True), (True, True, True), (False, False, True), (False, True, False)],
)
def test_a_head_without_its_own_weights_must_be_the_embedding(
    is_tied: bool, with_head: bool, is_embedding: bool, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, is_tied=is_tied, with_head=with_head)
    probes = folder_probes(folder, tensor_shapes(folder))
    assert np.array_equal(probes[HEAD], probes[EMBEDDING]) is is_embedding
    check_first_weights(probes, probes, model_dir=folder, dtype="float32")
    for wrong in (np.full(5, 1e30, np.float32), np.full(5, np.nan, np.float32), np.zeros(6, np.float32)):
        with pytest.raises(WeightProofError, match=r"may not tie its head to the embedding") as raised:
            check_first_weights(probes, {**probes, HEAD: wrong}, model_dir=folder, dtype="bfloat16")
        assert raised.value.tensor == HEAD


def names_of(live: Mapping[str, FloatArray], folder: Path) -> LiveNames:
    probes = folder_probes(folder, tensor_shapes(folder))
    return check_first_weights(probes, live, model_dir=folder, dtype="float32")


def test_a_live_tensor_that_the_folder_lacks_is_refused_and_one_that_nobody_serves_is_logged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, is_tied=True, with_head=False)
    probes = folder_probes(folder, tensor_shapes(folder))
    live = {**probes, "model.bias": np.zeros(3, np.float32)}
    with pytest.raises(WeightProofError, match=r"'model\.bias', which .* does not have"):
        require_explained(names_of(live, folder), folder)
    del live[NORM]
    for others in (live, {"language_model.head": np.full(5, 1e30, np.float32)}):
        with pytest.raises(WeightProofError, match=r"which .* does not have, under this or another name"):
            require_explained(names_of(others, folder), folder)
    with pytest.raises(WeightProofError, match=r"serves no tensor of .* nothing is proven"):
        names_of({}, folder)
    del live["model.bias"]
    with capture_logs() as logged:
        require_explained(names_of(live, folder), folder)
        require_explained(names_of({**live, "a.norm": probes[NORM]}, folder), folder)
    assert [(one["event"], one["first"]) for one in logged] == [("first_weights_not_proven", NORM)]


def test_a_layer_under_another_name_is_found_by_its_values(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, is_tied=True, with_head=False)
    probes = folder_probes(folder, tensor_shapes(folder))
    for tied in ({HEAD: probes[HEAD]}, {"output.weight": probes[EMBEDDING]}):  # one has the names of the folder
        live = {EMBEDDING: probes[EMBEDDING], "a.norm": probes[NORM], **tied}
        renamed = {"a.norm": NORM} | ({} if HEAD in tied else {"output.weight": EMBEDDING})
        assert names_of(live, folder) == LiveNames(renamed=renamed)


def test_a_layer_of_equal_values_belongs_to_no_tensor(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, is_tied=False, with_head=True)
    ones = {f"{name}.weight": torch.ones(3) for name in "ab"}
    save_file(ones, folder / "b.safetensors")
    probes = folder_probes(folder, tensor_shapes(folder))
    live = {name: probe for name, probe in probes.items() if name not in ones} | {"c": probes["a.weight"]}
    assert names_of(live, folder) == LiveNames(unnamed=tuple(ones), unexplained=("c",))
    save_file({"zero.weight": torch.zeros(3)}, folder / "b.safetensors")
    probes = folder_probes(folder, tensor_shapes(folder))
    assert names_of({**probes, "d": probes["zero.weight"]}, folder) == LiveNames(unexplained=("d",))


def test_other_layouts_are_no_other_weights(tmp_path: Path) -> None:
    """Rows in another order and transposed matrices, also square ones, have no probe of their own."""
    folder = folder_of(tmp_path, is_tied=False, with_head=True)
    square = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": square, "b.weight": square + 1}, folder / "b.safetensors")
    probes = folder_probes(folder, tensor_shapes(folder))
    other = {"a.weight": probe_tensor(square.T), "b.weight": probes["b.weight"][[2, 0, 1]]}
    assert names_of({**probes, **other}, folder) == LiveNames(unnamed=tuple(other), unexplained=tuple(other))
    with pytest.raises(WeightProofError, match=r"serves something else as tensor 'b\.weight'"):
        names_of({**probes, **other, "b.weight": probes["b.weight"] + 1}, folder)


class FakeWorkers:
    """Two ranks that serve the product of two tensors as one layer; faults change what they load."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.folder, self.served = dict(values), dict(values)

    def load(self, values: dict[str, float]) -> None:
        self.served = values

    def __call__(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "load_folder":
            self.load({name: value + (name in args[2]) for name, value in self.folder.items()})
            return [None, None]
        joined = {"ab": str(self.served["a"] * self.served["b"]), "stored ab": "", "norm": str(self.served["norm"])}
        return [joined, joined]


class Stuck(FakeWorkers):
    def load(self, values: dict[str, float]) -> None:
        """Load no joined layers."""
        self.served["norm"] = values["norm"]


class Forgetful(FakeWorkers):
    def load(self, values: dict[str, float]) -> None:
        """Keep what is larger."""
        self.served = {name: max(value, self.served[name]) for name, value in values.items()}


JOINED = LiveNames(unnamed=("a", "b"), unexplained=("ab",))
SHAPES: Shapes = {"a": (1,), "b": (1,), "norm": (1,)}


def round_trip(workers: FakeWorkers, found: LiveNames = JOINED) -> LiveNames:
    return prove_round_trip(workers, found, model_dir=Path("folder"), shapes=SHAPES)


def test_a_round_trip_proves_layers_without_names() -> None:
    values = {"a": 2.0, "b": 3.0, "norm": 1.0}
    assert round_trip(FakeWorkers(values)) == LiveNames(by_round_trip=("a", "b"))
    derived = LiveNames(unexplained=("ab",))  # all tensors are named, and one more layer comes from them
    assert round_trip(FakeWorkers(values), derived) == LiveNames()
    assert FakeWorkers(values).served == values
    unserved = LiveNames(unnamed=("mtp",))
    assert round_trip(FakeWorkers(values), unserved) == unserved
    for workers, message in (
        (Stuck(values), "'ab', which folder does not have"),
        (Forgetful(values), "with other bits"),
    ):
        with pytest.raises(WeightProofError, match=message):
            round_trip(workers)
