"""The Megatron learner, the only part of rl-distill that needs megatron-core.

Raises:
    MissingExtraError: megatron-core is not installed.
"""

import warnings

from rl_core.errors import MissingExtraError

try:
    with warnings.catch_warnings():
        # megatron says on import, several times, that Transformer Engine and apex are not there.
        warnings.filterwarnings("ignore", message=".*[Aa]pex.*not installed.*", category=UserWarning)
        import megatron.core.distributed
        import megatron.core.models.backends
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "the Megatron learner needs megatron-core; install it with: pip install 'rl-distill[megatron]'."
    ) from error
