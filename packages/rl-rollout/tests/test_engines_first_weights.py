"""Proof of the weights that an engine loads from its folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from rl_core.errors import WeightProofError
from rl_rollout.engines.weight_checks import EMBEDDING, HEAD, check_first_weights, folder_probes, tensor_shapes

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


def test_a_live_tensor_that_the_folder_lacks_is_refused_and_one_that_nobody_serves_is_logged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, is_tied=True, with_head=False)
    probes = folder_probes(folder, tensor_shapes(folder))
    live = {**probes, "model.bias": np.zeros(3, np.float32)}
    with pytest.raises(WeightProofError, match=r"'model\.bias', which .* does not have"):
        check_first_weights(probes, live, model_dir=folder, dtype="float32")
    del live[NORM]
    for others in (live, {"language_model.head": np.full(5, 1e30, np.float32)}):
        with pytest.raises(WeightProofError, match=r"which .* does not have, under this or another name"):
            check_first_weights(probes, others, model_dir=folder, dtype="float32")
    with pytest.raises(WeightProofError, match=r"serves no tensor of .* nothing is proven"):
        check_first_weights(probes, {}, model_dir=folder, dtype="float32")
    del live["model.bias"]
    with capture_logs() as logged:
        check_first_weights(probes, live, model_dir=folder, dtype="float32")
        check_first_weights(probes, {**live, "a.norm": probes[NORM]}, model_dir=folder, dtype="float32")
    assert [(one["event"], one["first"]) for one in logged] == [("first_weights_not_proven", NORM)]
