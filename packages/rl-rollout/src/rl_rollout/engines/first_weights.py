"""Proof of the weights that an engine loads from its folder, before any update."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import structlog
from safetensors import safe_open

from rl_core.data import FloatArray
from rl_core.errors import EngineError, WeightProofError
from rl_core.files import read_json_object
from rl_core.weights import BFLOAT16_TOLERANCES, ProofTolerances, probe_tensor
from rl_rollout.engines.weight_checks import Shapes, each_expert

log = structlog.get_logger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def folder_probes(model_dir: Path, shapes: Shapes) -> dict[str, FloatArray]:
    """Return the probe of each tensor that an engine must serve after it has loaded the folder.

    Args:
        model_dir: The model's folder.
        shapes: Its tensors; see `tensor_shapes`.

    Returns:
        [out] float32 by Hugging Face name. A head that is tied, or missing, has the embedding's probe.
    """
    probes: dict[str, FloatArray] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                for name, tensor in each_expert({stored: tensors.get_tensor(stored)}).items():
                    if name in shapes:
                        probes[name] = probe_tensor(tensor)
    is_tied = read_json_object(model_dir / "config.json", error=EngineError).get("tie_word_embeddings")
    if EMBEDDING in probes and (is_tied or HEAD not in probes):
        probes[HEAD] = probes[EMBEDDING]
    return probes


def check_first_weights(
    probes: Mapping[str, FloatArray], live: Mapping[str, FloatArray], *, model_dir: Path, dtype: str
) -> None:
    """Compare an engine's live layers with the folder that it loaded.

    A tensor that the engine serves under another name is found by its values. Tensors of the folder that it does not
    serve, such as those of a layer that only training uses, are not proven, and logged.

    Args:
        probes: Result of `folder_probes`.
        live: The engine's probe of each live tensor, by Hugging Face name.
        model_dir: The folder, for messages.
        dtype: The engine's dtype.

    Raises:
        WeightProofError: A live tensor differs, or comes from no tensor of the folder (the message names it), or the
            engine serves none of them.
    """
    tolerances = ProofTolerances() if dtype == "float32" else BFLOAT16_TOLERANCES
    for name in sorted(live.keys() & probes.keys()):
        share = _difference(probes[name], live[name])
        if not share <= tolerances.probe:
            raise WeightProofError(
                f"the engine loaded {model_dir}, but serves something else as tensor {name!r}: its probe differs by "
                f"{share:.2g} of its largest value (allowed {tolerances.probe:g}). {_cause(name)}",
                tensor=name,
            )
    unproven = sorted(probes.keys() - live.keys() - {HEAD})
    for name in sorted(live.keys() - probes.keys()):
        of = next((one for one in unproven if _difference(probes[one], live[name]) <= tolerances.probe), None)
        if of is None:
            raise WeightProofError(
                f"the engine serves tensor {name!r}, which {model_dir} does not have, under this or another name, so "
                "its values may be random. Write the folder again with save_pretrained, correct the setting of "
                "config.json that asks for it, or use the transformers engine.",
                tensor=name,
            )
        unproven.remove(of)
    if not live:
        raise WeightProofError(
            f"the engine serves no tensor of {model_dir} that can be read back, so nothing is proven."
        )
    if unproven:
        log.warning("first_weights_not_proven", folder=str(model_dir), tensors=len(unproven), first=unproven[0])


def _difference(expected: FloatArray, live: FloatArray) -> float:
    """Return the largest difference, relative to the largest expected value; inf for another shape."""
    if expected.shape != live.shape:
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):  # values that nobody initialized
        return float(np.abs(expected - live).max(initial=0.0)) / scale


def _cause(name: str) -> str:
    if name == HEAD:
        return (
            "The engine's implementation of this architecture may not tie its head to the embedding: save the folder "
            "with tie_word_embeddings = false and its own lm_head.weight, or use the transformers engine."
        )
    return "Its implementation of this architecture loads the tensor incorrectly; use the transformers engine."
