"""Models that transformers' own class computes: built from config.json alone, with names and shapes of their tensors.

Nothing in a folder runs as code: a model whose class transformers does not have is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rl_core.errors import DataError, RLError, SettingsError
from rl_core.files import preview
from rl_distill.architecture.mixture_config import MAX_EXPERTS as MAX_EXPERTS_TOGETHER

UNRELATED_FIELDS = frozenset(
    {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "num_labels", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)
"""Fields of config.json that do not change what a model computes."""


MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 14
CODE_FIELDS = ("attn_implementation", "experts_implementation")
"""Parts of the names of fields by which transformers may load kernels, which are code, from elsewhere."""


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse fields, at any depth, that make a model without end, or that packing would change.

    Raises:
        SettingsError: A rotary embedding depends on the longest row of a call.
        DataError: There are too many layers or experts.
    """
    for name, value in config.items():
        if name in ("rope_type", "type") and value in ("longrope", "dynamic"):
            raise SettingsError(
                f"rope_type {value!r} is not supported: its angles depend on the longest row that is computed together."
            )
        most = MAX_LAYERS if name.endswith(("layers", "layer")) else MAX_EXPERTS if name.endswith("experts") else None
        if most is not None and type(value) is int and value > most:
            raise DataError(f"config.json must have {name} <= {most}; found {preview(value)}.")
        if isinstance(value, Mapping):
            check_fields(value)
    layers, experts = (
        max((value for name, value in config.items() if name.endswith(end) and type(value) is int), default=1)
        for end in (("hidden_layers", "n_layer"), ("experts",))
    )
    if layers * experts > MAX_EXPERTS_TOGETHER:
        raise DataError(f"config.json must have at most {MAX_EXPERTS_TOGETHER} experts in all layers together.")


def canonical_json(config: Mapping[str, Any]) -> str:
    """Return the fields of a config.json that decide what the model computes, in a fixed order."""
    return json.dumps(_without_code({n: v for n, v in config.items() if n not in UNRELATED_FIELDS}), sort_keys=True)


def _without_code(value: Any) -> Any:
    """Drop the fields of CODE_FIELDS at any depth."""
    if not isinstance(value, Mapping):
        return value
    return {n: _without_code(v) for n, v in value.items() if not any(part in n for part in CODE_FIELDS)}


def read_config(text: str) -> Any:
    """Return transformers' configuration of a `canonical_json`, without dropout, which would change logprobs.

    Raises:
        SettingsError: transformers has no class for it.
        DataError: A field has a wrong type or value.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
    from transformers import __version__ as version

    content = PreTrainedConfig._decode_special_floats(json.loads(text))
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise SettingsError(
            f"model_type must be one of transformers {version}'s architectures; config.json has {preview(model_type)}. "
            "A folder's own code is not run: use a newer transformers that includes the architecture."
        )
    try:
        config: Any = CONFIG_MAPPING[model_type].from_dict(content)
    except Exception as error:  # strict configurations raise many types
        raise DataError(f"config.json does not describe a {model_type} model: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SettingsError(
            f"{model_type} is not a causal language model of transformers {version}. A policy needs one that predicts "
            "the next token."
        )
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith(("pdrop", "layerdrop"))) and isinstance(value, int | float):
            setattr(config, name, 0.0)
    return config


def build_model(text: str, **options: Any) -> Any:
    """Build the model with weights that are not set yet.

    Buffers that a folder stores as weights, such as a router's bias, become parameters that are not trained.

    Args:
        text: The model's `canonical_json`.
        **options: Options of `from_config`, such as `dtype`.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(read_config(text), trust_remote_code=False, **options)
    model.tie_weights()  # which belongs to the initialization that is skipped
    stored = model.state_dict()
    for name, buffer in list(model.named_buffers()):
        if name in stored:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            delattr(module, own)
            module.register_parameter(own, torch.nn.Parameter(buffer, requires_grad=False))
    return model


@lru_cache(maxsize=8)
def meta_model(text: str) -> Any:
    """Return the model without memory.

    Raises:
        DataError: transformers cannot build it.
    """
    import torch

    try:
        with torch.device("meta"):
            return build_model(text)
    except RLError:
        raise
    except Exception as error:  # any field may be wrong in any way
        raise DataError(
            f"transformers cannot build the model that config.json describes: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=8)
def model_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the folder by name, without tied ones."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    return {name: tuple(view.shape) for name, view in folder_views(model, dict(model.named_parameters())).items()}


@lru_cache(maxsize=8)
def untrained_names(text: str) -> frozenset[str]:
    """Return the folder's tensors that are not trained: those that transformers keeps as buffers."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozenset(folder_views(model, frozen))


@lru_cache(maxsize=8)
def linear_modules(text: str) -> dict[str, tuple[int, ...]]:
    """Return the [out, in] shape of each matrix that an adapter can change, by the module's name.

    These are the linear modules, without the head, whose matrix is a tensor of the folder with the module's name.
    """
    import torch

    model, shapes = meta_model(text), model_shapes(text)
    head = model.get_output_embeddings()
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and shapes.get(f"{name}.weight") == tuple(module.weight.shape)
    }


def model_tied(text: str) -> dict[str, str]:
    """Return the names of tied tensors, each mapped to the tensor whose values it shares."""
    return dict(getattr(meta_model(text), "all_tied_weights_keys", None) or {})


def head_name(text: str) -> str:
    """Return the name of the output matrix in the folder."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    head = model.get_output_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    return next(iter(folder_views(model, {name: head.weight})))


def is_left_out(text: str, name: str) -> bool:
    """Return whether a model has no tensor of this name in its folder, although the folder may have one.

    These are the tensors that the class ignores, and those of layers for multi-token prediction (MTP).
    """
    model = meta_model(text)
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    if any(re.search(pattern, name) for pattern in {*patterns, r"(^|\.)mtp(_layers)?\."}):
        return True
    config, layer = model.config, re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    first, num_mtp = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return layer is not None and first <= int(layer[1]) < first + num_mtp


def has_stateful_layers(text: str) -> bool:
    """Return whether layers keep a state from token to token, such as convolutions and linear attention."""
    import torch

    model = meta_model(text)
    return bool(model._is_stateful) or any(isinstance(module, torch.nn.Conv1d) for module in model.modules())


def check_class(text: str, architecture: str) -> None:
    """Check that a folder's architecture is the class that computes it.

    Raises:
        SettingsError: It is another class, such as a classifier.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = read_config(text)
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    if architecture not in ("(none)", found):
        raise SettingsError(
            f"architecture {architecture} is not supported: the causal language model of model_type "
            f"{config.model_type!r} is {found}. A policy needs that class; convert the folder, or correct config.json."
        )


@lru_cache(maxsize=8)
def dimensions(text: str) -> dict[str, Any]:
    """Return the fields of a `PolicyConfig` that are known for any model; those of attention are 1 without it."""
    config = read_config(text).get_text_config()

    def field(name: str, otherwise: Any) -> Any:
        try:
            return getattr(config, name, None) or otherwise
        except Exception:  # a field that differs between layers
            return otherwise

    hidden_size, heads = int(config.hidden_size), int(field("num_attention_heads", 1))
    widths = field("intermediate_size", 4 * hidden_size)
    return {
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": hidden_size,
        "ffn_hidden_size": int(max(widths) if isinstance(widths, list | tuple) else widths),
        "num_heads": heads,
        "num_key_value_heads": int(field("num_key_value_heads", heads)),
        "head_dim": int(field("head_dim", hidden_size // heads)),
        "vocab_size": int(config.vocab_size),
        "max_position_embeddings": int(min(field("max_position_embeddings", math.inf), 2**31 - 1)),
        "is_tied": bool(config.tie_word_embeddings),
        "initializer_range": float(field("initializer_range", 0.02)),
        "norm_eps": 1e-6,
        "rope_base": 1e4,
    }
