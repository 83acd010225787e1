"""A folder's tensors as views of the parameters of transformers' model, for any architecture.

transformers converts a folder's tensors into parameters when it loads a model, for example by stacking experts, and can
revert the conversion to save them. Reverted without copies, each tensor of the folder is a view of a parameter: writing
into it changes the model. So no package needs to know an architecture's names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.errors import SettingsError

if TYPE_CHECKING:
    import torch


def folder_views(model: Any, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return views of tensors by the names that `save_pretrained` gives them, whatever folder the model comes from.

    Args:
        model: A `PreTrainedModel` of the architecture, which may be on the meta device.
        tensors: Its parameters and persistent buffers, or other tensors of the same shapes, by the model's names.

    Raises:
        SettingsError: transformers computes a tensor of the folder, so it is no part of a parameter.
    """
    from torch import Tensor
    from torch.overrides import TorchFunctionMode
    from transformers.core_model_loading import revert_weight_conversion

    class InPlace(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))

    of_its_folder = model.__dict__.pop("_weight_conversions", None)
    try:
        with InPlace():
            versions = [tensor._version for tensor in tensors.values()]
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            views: dict[str, Tensor] = revert_weight_conversion(model, detached)
    finally:
        if of_its_folder is not None:
            model._weight_conversions = of_its_folder
    own = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    computed = sorted(name for name, view in views.items() if view.untyped_storage()._cdata not in own)
    changed = [name for (name, one), version in zip(tensors.items(), versions, strict=True) if one._version != version]
    if computed or changed:
        raise SettingsError(
            f"transformers computes tensor {(computed or changed)[0]!r} of {type(model).__name__}'s folder from its "
            "parameters, so the weights cannot be updated in place. Use another architecture."
        )
    return views
