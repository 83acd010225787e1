"""Models that transformers' own class computes: built from config.json alone, with names and shapes of their tensors.

Nothing in a folder runs as code: a model whose class transformers does not have is refused.
"""

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rl_core import images
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
    """Refuse fields, at any depth, that make a model without end. Fields that the class does not have are ignored.

    Raises:
        DataError: There are too many layers or experts.
    """
    from transformers import CONFIG_MAPPING

    if (kind := config.get("model_type")) in CONFIG_MAPPING:
        fields = {*inspect.signature(CONFIG_MAPPING[kind]).parameters, *CONFIG_MAPPING[kind].attribute_map}
        config = {name: value for name, value in config.items() if name in fields or isinstance(value, Mapping)}
    for name, value in config.items():
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
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers import __version__ as version

    content = PreTrainedConfig._decode_special_floats(json.loads(text))
    model_type = content.get("model_type")
    if model_type is None:
        raise DataError("config.json must have a model_type, the architecture's name in transformers; found none.")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise SettingsError(
            f"model_type must be one of transformers {version}'s architectures; config.json has {preview(model_type)}. "
            "A folder's own code is not run: use a newer transformers that includes the architecture."
        )
    try:
        config: Any = CONFIG_MAPPING[model_type].from_dict(content)
    except Exception as error:  # strict configurations raise many types
        raise DataError(f"config.json does not describe a {model_type} model: {error}") from error
    if type(config) not in _classes_of(config):
        raise SettingsError(
            f"{model_type} is not a causal language model of transformers {version}. A policy needs one that predicts "
            "the next token."
        )
    _without_dropout(config)
    return config


def _classes_of(config: Any) -> Any:
    """Return transformers' classes of policies by configuration: those with images, or the text models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    has_images = getattr(config, "vision_config", None) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_images else MODEL_FOR_CAUSAL_LM_MAPPING


def _without_dropout(config: Any) -> None:
    """Set every dropout of a configuration and its parts to 0."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif ("dropout" in name or name.endswith(("pdrop", "layerdrop"))) and type(value) in (int, float):
            setattr(config, name, type(value)(0))  # a field may take only one of the types


def build_model(text: str, **options: Any) -> Any:
    """Build the model with weights that are not set yet.

    Buffers that a folder stores as weights, such as a router's bias, become parameters that are not trained.

    Args:
        text: The model's `canonical_json`.
        **options: Options of `from_config`, such as `dtype`.
    """
    import torch
    from transformers.initialization import no_init_weights

    config = read_config(text)
    with no_init_weights():
        model = _classes_of(config)[type(config)]._from_config(config, **options)
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
    """Return the shape of every tensor of the folder by name, without tied ones.

    Raises:
        SettingsError: A tensor has whole numbers, or is computed from parameters.
    """
    from rl_core.weights import folder_views

    model = meta_model(text)
    views = folder_views(model, dict(model.named_parameters()))
    if tables := [name for name, view in views.items() if not view.is_floating_point()]:
        raise SettingsError(
            f"{type(model).__name__} is not supported: tensor {tables[0]!r} of its folder has whole numbers, which no "
            "optimizer or engine updates. Use another architecture."
        )
    return {name: tuple(view.shape) for name, view in views.items()}


@lru_cache(maxsize=8)
def untrained_names(text: str) -> frozenset[str]:
    """Return the folder's tensors that are not trained: those that transformers keeps as buffers."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozenset(folder_views(model, frozen))


@lru_cache(maxsize=8)
def image_token_id(text: str) -> int | None:
    """Return the id of the tokens whose embeddings an image replaces; None if the model has no images."""
    if not json.loads(text).get("vision_config"):
        return None
    found = images.image_token_id(read_config(text))
    return -1 if found is None else found


def vision_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters outside of a model's language layers and head, by name: its vision tower and projector."""
    if not getattr(model.config, "vision_config", None):
        return {}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    language = {parameter for part in parts for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in language}


@lru_cache(maxsize=8)
def vision_names(text: str) -> frozenset[str]:
    """Return the folder's tensors of the vision tower and projector."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    return frozenset(folder_views(model, vision_parameters(model)))


@lru_cache(maxsize=8)
def linear_modules(text: str) -> dict[str, tuple[int, ...]]:
    """Return the [out, in] shape of each matrix that an adapter can change, by the module's name.

    These are the linear modules, without the head, routers and the vision tower, whose matrix is a tensor of the folder
    with the module's name; with a vision tower, under any name. A module named as the folder's experts is left out,
    because peft takes its name for theirs, and so is one whose parent reads the matrix instead of calling the module.
    """
    import torch

    model, shapes, matrices = meta_model(text), model_shapes(text), matrix_names(text)
    head, vision = model.get_output_embeddings(), vision_parameters(model)
    names = {name for name in shapes if name.endswith(".weight")} if vision else shapes.keys()
    known = set(matrices.values() if vision else model.state_dict())
    converted = {name.split(".")[-2] for name in names - known if "." in name}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and f"{name}.weight" not in vision
        and name.rpartition(".")[2] not in converted
        and shapes.get(matrices.get(name, "")) == tuple(module.weight.shape)
        and (vision or name + ".weight" == matrices[name])
        and _is_called(model, name)
    }
    multiplies = {kind: _multiplies(module) for kind, module in {type(m): m for m in linear.values()}.items()}
    return {name: tuple(m.weight.shape) for name, m in linear.items() if multiplies[type(m)]}


@lru_cache(maxsize=8)
def matrix_names(text: str) -> dict[str, str]:
    """Return the folder's name of each module's weight, if it is one of the folder's tensors."""
    from rl_core.weights import folder_views

    model = meta_model(text)
    modules = {
        parameter.untyped_storage()._cdata: name.removesuffix(".weight")
        for name, parameter in model.named_parameters()
        if name.endswith(".weight")
    }
    views = folder_views(model, dict(model.named_parameters()))
    owners = {name: modules.get(view.untyped_storage()._cdata, "") for name, view in views.items()}
    counts = Counter(owners.values())
    return {module: name for name, module in owners.items() if module and counts[module] == 1}


def _is_called(model: Any, name: str) -> bool:
    path, _, own = name.rpartition(".")
    parent: Any = type(model.get_submodule(path))
    return not re.search(rf"self\.{own}\.weight\b(?!\.(dtype|device|shape))", _source(parent))


@lru_cache(maxsize=64)
def _source(kind: type) -> str:
    return inspect.getsource(kind)


def _multiplies(module: Any) -> bool:
    """Return whether a linear module only multiplies; a class's own module, such as a router, may do more."""
    import torch

    if type(module).forward is torch.nn.Linear.forward:
        return True
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(2, module.in_features)
        own = {name: torch.randn(tensor.shape) for name, tensor in module.named_parameters()}
    try:
        found = torch.func.functional_call(module, own, (x,))
    except Exception:  # it may want other arguments
        return False
    expected = torch.nn.functional.linear(x, own["weight"], own.get("bias"))
    is_alike = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return is_alike and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


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


def has_experts(text: str) -> bool:
    """Return whether the model is a mixture of experts: a field, at any depth, counts several."""

    def counts(config: Mapping[str, Any]) -> bool:
        return any(
            counts(value)
            if isinstance(value, Mapping)
            else str(name).endswith("experts") and type(value) is int and value > 1
            for name, value in config.items()
        )

    return counts(read_config(text).to_dict())


def default_router_loss(text: str) -> float:
    """Return the coefficient of the auxiliary router loss, the class's own if config.json has none."""
    return float(getattr(read_config(text).get_text_config(), "router_aux_loss_coef", None) or 0.0)


def is_left_out(text: str, name: str) -> bool:
    """Return whether a model has no tensor of this name in its folder, although the folder may have one.

    These are the tensors that the class ignores, and those of layers for multi-token prediction (MTP).
    """
    model = meta_model(text)
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    if any(re.search(pattern, name) for pattern in {*patterns, r"(^|\.)mtp(_layers)?\."}):
        return True
    config, layer = model.config.get_text_config(), re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    first, num_mtp = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return layer is not None and first <= int(layer[1]) < first + num_mtp


def has_stateful_layers(text: str) -> bool:
    """Return whether layers keep a state from token to token, such as convolutions and linear attention."""
    import torch

    model = meta_model(text)
    return bool(model._is_stateful) or any(isinstance(module, torch.nn.Conv1d) for module in model.modules())


def checked_class(text: str, architecture: str) -> str:
    """Return the class that computes a model, which must be its folder's architecture if that names one.

    Raises:
        SettingsError: It is another class, such as a classifier, or an encoder.
    """
    config = read_config(text)
    kind = _classes_of(config)[type(config)]
    found: str = kind.__name__
    if architecture not in ("(none)", found):
        raise SettingsError(
            f"architecture {architecture} is not supported: the causal language model of model_type "
            f"{config.model_type!r} is {found}. A policy needs that class; convert the folder, or correct config.json."
        )
    if not getattr(config, "is_decoder", True) and "add `is_decoder=True" in _source(kind):  # the class's own warning
        raise SettingsError(
            f"{found} cannot be trained: its tokens see later ones, and a policy predicts each token from those before "
            "it. If the class can be a decoder, set is_decoder = true in config.json."
        )
    return found


def _length_of_angles(rope: Mapping[str, Any]) -> float:
    """Return the length up to which angles do not depend on the longest row of a call, as those of `longrope` do."""
    parts = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]  # of each kind of layer
    lengths = (one["original_max_position_embeddings"] for one in parts if one.get("rope_type") == "longrope")
    return min(lengths, default=math.inf)


@lru_cache(maxsize=8)
def dimensions(text: str) -> dict[str, Any]:
    """Return the fields of a `PolicyConfig` that are known for any model; those of attention are 1 without it."""
    whole = read_config(text)
    config = whole.get_text_config()

    def field(name: str, otherwise: Any) -> Any:
        try:
            return getattr(config, name, None) or otherwise
        except Exception:  # a field that differs between layers
            return otherwise

    hidden_size, heads = int(config.hidden_size), int(field("num_attention_heads", 1))
    widths = field("intermediate_size", 4 * hidden_size)
    positions = field("max_position_embeddings", math.inf)
    positions = positions if positions > 0 else math.inf  # XLNet's -1
    return {
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": hidden_size,
        "ffn_hidden_size": int(max(widths) if isinstance(widths, list | tuple) else widths),
        "num_heads": heads,
        "num_key_value_heads": int(field("num_key_value_heads", heads)),
        "head_dim": int(field("head_dim", hidden_size // heads)),
        "vocab_size": int(config.vocab_size),
        "max_position_embeddings": int(min(positions, _length_of_angles(field("rope_parameters", {})), 2**31 - 1)),
        "is_tied": bool(field("tie_word_embeddings", whole.tie_word_embeddings)),
        "initializer_range": float(field("initializer_range", 0.02)),
        "norm_eps": 1e-6,
        "rope_base": 1e4,
    }
