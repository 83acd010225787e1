"""Proof, without names, that updates reach the live layers: other weights are loaded, and then the folder's own.

An engine may join, split, transpose or convert tensors when it loads them, so that no live layer has a tensor of the
folder under any name. Its layers must then change with the folder's tensors, and return bit for bit, in the way of an
update. That shows that nothing is left over from an earlier update. Whether the values are right is shown by a canary.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import WeightProofError
from rl_rollout.engines.weight_checks import LiveNames, Shapes

log = structlog.get_logger(__name__)

CallWorkers = Callable[..., list[Any]]
"""Calls a method of every worker: vLLM's `collective_rpc`."""


def prove_round_trip(call: CallWorkers, found: LiveNames, *, model_dir: Path, shapes: Shapes) -> LiveNames:
    """Load other values of the tensors without a live layer, then the folder's own, and compare what is served.

    Args:
        call: Calls the workers.
        found: How live layers are found among the folder's tensors.
        model_dir: The folder that the engine has loaded.
        shapes: Its tensors.

    Returns:
        The same, with the proven tensors and layers moved to `by_round_trip`. Tensors that the engine does not serve
        stay.

    Raises:
        WeightProofError: A live layer without a tensor of its own did not change, or a layer did not return.
    """
    names = tuple(shapes)

    def signature() -> dict[tuple[int, str], str]:
        ranks = call("live_signature", args=(names,))
        return {(rank, name): digest for rank, of_rank in enumerate(ranks) for name, digest in of_rank.items()}

    before = signature()
    call("load_folder", args=(model_dir, shapes, found.unnamed or names))
    other = signature()
    call("load_folder", args=(model_dir, shapes, ()))
    after = signature()
    for rank, name in before:
        if name in found.unexplained and before[rank, name] == other.get((rank, name)):
            raise WeightProofError(
                f"the engine serves tensor {name!r}, which {model_dir} does not have, under this or another name, and "
                "which an update with other values of the folder's tensors does not change. Its values may be random, "
                "or vLLM cannot load weights of this architecture again. Write the folder again with save_pretrained, "
                "correct the setting of config.json that asks for it, or use the transformers engine.",
                tensor=name,
            )
    if changed := sorted(before.items() ^ after.items()):
        (_, name), _ = changed[0]
        raise WeightProofError(
            f"the engine loaded {model_dir} again after other weights, in the way of an update, and serves {name!r} "
            "with other bits. vLLM cannot load weights of this architecture again; use the transformers engine.",
            tensor=name,
        )
    if before == other:
        return found
    log.info("round_trip_proven", folder=str(model_dir), tensors=len(found.unnamed), layers=len(found.unexplained))
    return replace(found, unnamed=(), unexplained=(), by_round_trip=found.unnamed)
