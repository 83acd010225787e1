"""LoRA adapters in a transformers model: added by peft, replaced in memory, read back bit for bit.

Importing this imports torch and peft.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from rl_core.data import FloatArray
from rl_core.errors import EngineError
from rl_core.weights import LORA_A, POLICY_ADAPTER, probe_tensor
from rl_rollout.engines.weight_checks import module_of

NAME = "published"
"""Name of the policy's adapter in peft's layers. Those of the others begin with it."""

Tensors = Mapping[str, torch.Tensor]


class ModelAdapters:
    """The adapters of one model by their names. The model starts without one.

    Their tensors are kept beside the live ones, so that an adapter's update can restore the layers of all.
    """

    def __init__(self, model: PreTrainedModel, kinds: tuple[str, ...]) -> None:
        """Store the model unchanged.

        Args:
            model: The model to adapt.
            kinds: Last parts of the names of the modules that it may change. None allows all.
        """
        self._model = model
        head = model.get_output_embeddings()
        self._allowed = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
            if not kinds or name.rpartition(".")[2] in kinds
        }
        self._kept: dict[str, Tensors] = {}
        self._active = NAME

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def replace(self, name: str, tensors: Tensors) -> None:
        """Serve this adapter instead of the last one of its name.

        Args:
            name: Name of the adapter.
            tensors: A and B by peft's names, B with the scaling.

        Raises:
            EngineError: It changes a module that it must not change. Nothing was modified.
        """
        if barred := [module for module in map(module_of, tensors) if module not in self._allowed]:
            raise EngineError(
                f"an adapter may change only linear layers in the engine's lora_target_modules; found {barred[0]!r}. "
                "Add the last part of its name there, or remove it from the adapter."
            )
        last = self._kept.get(name, {})
        self._kept[name] = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        if _shapes(last) != _shapes(tensors) or self.problems() or self._are_others_damaged(name):
            self._put_all()
        else:
            self._write(name)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def keep(self, names: Iterable[str]) -> None:
        """Drop all other adapters."""
        self._kept = {name: self._kept[name] for name in names}
        self._put_all()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the model computes without any adapter."""
        layers = [layer for _, layer in _adapted(self._model)]
        try:
            for layer in layers:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def activate(self, name: str) -> None:
        """Compute with this adapter from now on, outside of `left_out`."""
        if self._active != _peft_name(name):
            self._active = _peft_name(name)
            for _, layer in _adapted(self._model):
                layer.set_adapter(self._active, inference_mode=True)

    def live(self, name: str, tensors: Tensors) -> dict[str, FloatArray]:
        """Probe each live A and B of an adapter. NaN if a tensor differs from the one that arrived, bit for bit."""
        found = {}
        for key, tensor in tensors.items():
            live = self._live(name, key)
            if live is not None:
                probe = probe_tensor(live, key)
                found[key] = probe if _are_equal(live, tensor) else np.full_like(probe, np.nan)
        return found

    def problems(self) -> list[str]:
        """Describe problems other than A and B, such as a disabled, scaled or unexpected adapter."""
        wanted: dict[str, set[str]] = {}
        for name, tensors in self._kept.items():
            for module in map(module_of, tensors):
                wanted.setdefault(module, set()).add(_peft_name(name))
        layers = dict(_adapted(self._model))
        found = [f"{module} has no adapter." for module in sorted(wanted.keys() - layers.keys())]
        unwanted = sorted(layers.keys() - wanted.keys())
        found += [f"{module} has an adapter, but the update has none for it." for module in unwanted]
        for module in sorted(wanted.keys() & layers.keys()):
            found += [f"{module} {problem}" for problem in _problems(layers[module], self._active, wanted[module])]
        return found

    def _are_others_damaged(self, name: str) -> bool:
        for other, tensors in self._kept.items():
            for key, tensor in tensors.items() if other != name else ():
                live = self._live(other, key)
                if live is None or not _are_equal(live, tensor):
                    return True
        return False

    def _put_all(self) -> None:
        self._drop()
        for name, tensors in self._kept.items():
            self._put(name, tensors)
            self._write(name)
        for _, layer in _adapted(self._model):
            layer.set_adapter(self._active, inference_mode=True)

    def _write(self, name: str) -> None:
        for key, tensor in self._kept[name].items():
            live = self._live(name, key)
            if live is not None:
                live.copy_(tensor)

    def _drop(self) -> None:
        for name, layer in _adapted(self._model):
            self._model.set_submodule(name, layer.get_base_layer())

    def _put(self, name: str, tensors: Tensors) -> None:
        targets = "|".join(map(re.escape, dict.fromkeys(map(module_of, tensors))))
        rank = next(len(tensor) for key, tensor in tensors.items() if key.endswith(LORA_A))
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, inference_mode=True)
        with torch.random.fork_rng(devices=[]):  # peft draws initial values, which are replaced
            inject_adapter_in_model(config, self._model, _peft_name(name))
        del self._model.peft_config  # which peft would find there again
        self._model.eval()

    def _live(self, name: str, key: str) -> torch.Tensor | None:
        """Return the live A or B of an adapter, by peft's name of the tensor. None if its layer has no such adapter."""
        layer, own = self._model.get_submodule(module_of(key)), _peft_name(name)
        if not isinstance(layer, LoraLayer) or own not in layer.lora_A:
            return None
        return (layer.lora_A if key.endswith(LORA_A) else layer.lora_B)[own].get_parameter("weight")


def _peft_name(name: str) -> str:
    """Return an adapter's name for peft, which allows no dots."""
    return NAME if name == POLICY_ADAPTER else f"{NAME}-{name.encode().hex()}"


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in tensors.items()}


def _adapted(model: torch.nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _problems(layer: LoraLayer, active: str, wanted: Collection[str]) -> Iterator[str]:
    if layer.disable_adapters:
        yield "does not use its adapter."
    if layer.merged:
        yield f"has merged the adapters {layer.merged_adapters} into its base."
    if list(layer.active_adapters) != [active]:
        yield f"serves the adapters {list(layer.active_adapters)}; only {[active]} is published."
    if layer.lora_A.keys() != wanted:
        yield f"has the adapters {sorted(layer.lora_A)}; only {sorted(wanted)} are published."
    for own in sorted(wanted):
        if (scaling := layer.scaling.get(own)) != 1.0:
            yield f"scales its adapter by {scaling}; the scaling must be 1 because B is already multiplied."


def _are_equal(live: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compare bits, in the live tensor's dtype."""
    return torch.equal(_bits(live), _bits(tensor.to(live.device, live.dtype)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
