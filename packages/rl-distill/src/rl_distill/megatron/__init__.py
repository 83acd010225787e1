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
    """Disable torch.compile for the functions that Megatron decorates during its import.

    The decorator imports torch's compiler, which takes 5 s in every rank. The decorated functions are fusions that
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
    """Hide wandb and TensorBoard from Megatron's timers and inference, which the learner does not use.

    Importing them takes half a second in every rank. A module that the process has already imported stays visible.
    """
    hidden = {"wandb", "tensorboard"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # importing a None entry raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


try:
    with warnings.catch_warnings(), _without_compilation(), _without_trackers():
        # On import, megatron warns several times that Transformer Engine and apex are missing.
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
