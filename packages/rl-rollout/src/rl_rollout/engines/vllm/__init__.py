"""vLLM as a rollout engine in the calling process. The installed vLLM decides between CPUs and GPUs."""

from pathlib import Path

from rl_core.errors import MissingExtraError
from rl_core.record_fields import converts_arguments
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.model_folder import require_model_folder
from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.stepped import SteppedEngine
from rl_rollout.engines.stepper import Stepper
from rl_rollout.engines.vllm.support import INSTALL, check_support
from rl_rollout.prompts.tokenizer import PromptTokenizer

__all__ = ["VLLMEngine", "VLLMOptions"]


class VLLMEngine(SteppedEngine):
    """vLLM in this process. It starts no other process, so a debugger works.

    Create a learner in the same process before the engine starts: both share torch.distributed, which must have a world
    size of 1. A process holds one such engine at a time. To run several, use `rl_rollout.engines.process`.
    """

    @converts_arguments
    def __init__(self, model_dir: Path, options: VLLMOptions | None = None) -> None:
        """Choose a model. `start` loads it.

        Args:
            model_dir: A Hugging Face folder with safetensors.
            options: The engine's options.
        """
        self._model_dir = Path(model_dir)
        self._options = options or VLLMOptions()
        super().__init__(
            self._load,
            in_thread=True,
            decoder=lambda: PromptTokenizer.load(self._model_dir).decoder(),
            images=lambda: EngineImages.open(self._model_dir, self._options.image_folder),
        )

    @staticmethod
    @converts_arguments
    def check(model_dir: Path, options: VLLMOptions) -> None:
        """Check whether the installed vLLM supports a model with these options. No model is loaded.

        The first call imports vLLM in a child process, which takes seconds. The result is cached on disk.

        Raises:
            EngineError: vLLM does not support it. The message lists what it supports.
            MissingExtraError: vLLM is not installed.
        """
        check_support(model_dir, options)

    def _load(self) -> Stepper:
        require_model_folder(self._model_dir)
        try:
            from rl_rollout.engines.vllm.environment import prepare_environment

            prepare_environment()
            from rl_rollout.engines.vllm.stepper import VLLMStepper
        except ImportError as error:
            raise MissingExtraError(
                f"the vLLM engine needs vLLM, which cannot be imported here: {error}. {INSTALL}"
            ) from error
        return VLLMStepper(self._model_dir, self._options)
