"""The Megatron learner, the only part of rl-distill that needs megatron-core.

Raises:
    MissingExtraError: megatron-core is not installed.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_core.errors import MissingExtraError


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Leave functions that megatron decorates while it is imported as they are.

    To decorate is to import torch's compiler, which takes 5 s in every rank; what megatron decorates are fusions that
    `model_spec` turns off.
    """
    compile_function = torch.compile

    def keep(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return keep if function is None else function

    torch.compile = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


@contextmanager
def _without_trackers() -> Iterator[None]:
    """Hide wandb and TensorBoard from megatron's timers and inference, where we do not use them.

    Importing them takes half a second in every rank. Where the process has imported one already, it stays.
    """
    hidden = {"wandb", "tensorboard"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None makes an import raise ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


try:
    with warnings.catch_warnings(), _without_compilation(), _without_trackers():
        # megatron says on import, several times, that Transformer Engine and apex are not there.
        warnings.filterwarnings("ignore", message=".*[Aa]pex.*not installed.*", category=UserWarning)
        import megatron.core.distributed
        import megatron.core.models.backends
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "the Megatron learner needs megatron-core. Install rl-distill[megatron] as the README says."
    ) from error
