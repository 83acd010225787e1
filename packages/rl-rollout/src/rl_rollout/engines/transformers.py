"""transformers as a rollout engine: the reference implementation, with no further dependency."""

from pathlib import Path

from rl_core.errors import MissingExtraError
from rl_core.record_fields import converts_arguments
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.model_folder import require_model_folder
from rl_rollout.engines.options import TransformersOptions
from rl_rollout.engines.stepped import SteppedEngine
from rl_rollout.engines.stepper import Stepper
from rl_rollout.prompts.tokenizer import PromptTokenizer

__all__ = ["TransformersEngine", "TransformersOptions"]


class TransformersEngine(SteppedEngine):
    """A Hugging Face causal model with this package's own sampling loop, in the calling thread.

    In float32 with one thread, results are identical bit for bit if the same requests arrive in the same turns of the
    event loop. Each sampled token depends only on the sample's seed and the token's position.
    """

    @converts_arguments
    def __init__(self, model_dir: Path, options: TransformersOptions | None = None) -> None:
        """Choose a model. `start` loads it.

        Args:
            model_dir: A Hugging Face folder with safetensors.
            options: The engine's options.
        """
        self._model_dir = Path(model_dir)
        self._options = options or TransformersOptions()
        super().__init__(
            self._load,
            in_thread=False,
            decoder=lambda: PromptTokenizer.load(self._model_dir).decoder(),
            images=lambda: EngineImages.open(self._model_dir, self._options.image_folder),
        )

    def _load(self) -> Stepper:
        require_model_folder(self._model_dir)
        try:
            from rl_rollout.engines.transformers_stepper import TransformersStepper
        except ImportError as error:
            raise MissingExtraError(
                f"the transformers engine needs torch and transformers: {error}. Install rl-rollout[transformers]."
            ) from error
        if not self._options.max_lora_rank:
            return TransformersStepper(self._model_dir, self._options)
        try:
            from rl_rollout.engines.transformers_adapters import ModelAdapters
        except ImportError as error:
            raise MissingExtraError(
                f"max_lora_rank = {self._options.max_lora_rank} needs peft: {error}. Install rl-rollout[peft], or "
                "set it to 0."
            ) from error
        return TransformersStepper(self._model_dir, self._options, adapters=ModelAdapters)
