"""Which engine serves a model if none is named. Importing this module loads no engine."""

import importlib.util
from pathlib import Path

from rl_core.errors import MissingExtraError, RLError
from rl_core.files import read_json_object
from rl_core.record_fields import converts_arguments, record
from rl_rollout.engines.options import DType


@record
class EngineChoice:
    """An engine for a model.

    Attributes:
        name: "vllm" or "transformers".
        reason: Why this one.
    """

    name: str
    reason: str


@converts_arguments
def choose_engine(model_dir: Path, *, dtype: DType = "bfloat16") -> EngineChoice:
    """Return vLLM where it is installed and supports the model, else the transformers engine.

    Reads only config.json. The first call imports vLLM in a child process, which takes seconds; the result is cached on
    disk.

    Args:
        model_dir: The model's folder.
        dtype: Dtype in which the engine computes.
    """
    from rl_rollout.engines.vllm.support import installed_support

    if importlib.util.find_spec("vllm") is None:
        return EngineChoice(name="transformers", reason="vLLM is not installed")
    try:
        support = installed_support()
        config = read_json_object(model_dir / "config.json")
    except MissingExtraError as error:
        return EngineChoice(name="transformers", reason=str(error))
    except RLError:  # whoever reads the folder reports it
        return EngineChoice(name="vllm", reason="vLLM is installed")
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    shown = " or ".join(architectures) or "the architecture"
    if support.architectures and not set(architectures) & set(support.architectures):
        return EngineChoice(name="transformers", reason=f"{support.name} does not know {shown}")
    for problem in support.model_problems(config, dtype, with_images="vision_config" in config):
        return EngineChoice(name="transformers", reason=f"{support.name} cannot serve the model: {problem}")
    return EngineChoice(name="vllm", reason=f"{support.name} knows {shown}")
