"""A LoRA adapter in a transformers model: added by peft, replaced in memory, read back bit for bit.

Importing this imports torch and peft.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from rl_core.data import FloatArray
from rl_core.errors import EngineError
from rl_core.weights import LORA_A, probe_tensor
from rl_rollout.engines.weight_checks import module_of

NAME = "published"
"""Name of this package's adapter in peft's layers."""


class ModelAdapter:
    """The adapter of one model. The model starts without one."""

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
        self._shapes: dict[str, torch.Size] = {}

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve this adapter instead of the last.

        Args:
            tensors: A and B by peft's names, B with the scaling. Empty serves only the base.

        Raises:
            EngineError: It changes a module that it must not change. Nothing was modified.
        """
        modules = list(dict.fromkeys(map(module_of, tensors)))
        if barred := [name for name in modules if name not in self._allowed]:
            raise EngineError(
                f"an adapter may change only linear layers in the engine's lora_target_modules; found {barred[0]!r}. "
                "Add the last part of its name there, or remove it from the adapter."
            )
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != self._shapes or self.problems(tensors):
            self._drop()
            if modules:
                self._put(modules, rank=next(len(one) for name, one in tensors.items() if name.endswith(LORA_A)))
            self._shapes = shapes
        for name, tensor in tensors.items():
            live = self._live(name)
            if live is not None:
                live.copy_(tensor)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the model computes without the adapter."""
        layers = [layer for _, layer in _adapted(self._model)]
        try:
            for layer in layers:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def live(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, FloatArray]:
        """Probe each live A and B. NaN if a tensor differs from the one that arrived, bit for bit."""
        found = {}
        for name, tensor in tensors.items():
            live = self._live(name)
            if live is not None:
                probe = probe_tensor(live, name)
                is_same = torch.equal(_bits(live), _bits(tensor.to(live.device, live.dtype)))
                found[name] = probe if is_same else np.full_like(probe, np.nan)
        return found

    def problems(self, tensors: Iterable[str]) -> list[str]:
        """Describe problems other than A and B, such as a disabled, scaled or unexpected adapter."""
        wanted = set(map(module_of, tensors))
        layers = dict(_adapted(self._model))
        found = [f"{name} has no adapter." for name in sorted(wanted - layers.keys())]
        found += [f"{name} has an adapter, but the update has none for it." for name in sorted(layers.keys() - wanted)]
        for name in sorted(wanted & layers.keys()):
            found += [f"{name} {problem}" for problem in _problems(layers[name])]
        return found

    def _drop(self) -> None:
        for name, layer in _adapted(self._model):
            self._model.set_submodule(name, layer.get_base_layer())
        if hasattr(self._model, "peft_config"):
            del self._model.peft_config

    def _put(self, modules: list[str], *, rank: int) -> None:
        targets = "|".join(map(re.escape, modules))
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, inference_mode=True)
        with torch.random.fork_rng(devices=[]):  # peft draws initial values, which are replaced
            inject_adapter_in_model(config, self._model, NAME)
        self._model.eval()

    def _live(self, name: str) -> torch.Tensor | None:
        """Return the live A or B. None if the model has no adapter of this package."""
        layer = self._model.get_submodule(module_of(name))
        if not isinstance(layer, LoraLayer) or NAME not in layer.lora_A:
            return None
        return (layer.lora_A if name.endswith(LORA_A) else layer.lora_B)[NAME].get_parameter("weight")


def _adapted(model: torch.nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _problems(layer: LoraLayer) -> Iterator[str]:
    if layer.disable_adapters:
        yield "does not use its adapter."
    if layer.merged:
        yield f"has merged the adapters {layer.merged_adapters} into its base."
    if list(layer.active_adapters) != [NAME]:
        yield f"serves the adapters {list(layer.active_adapters)}; only {[NAME]} is published."
    scaling = layer.scaling.get(NAME)
    if scaling != 1.0:
        yield f"scales its adapter by {scaling}; the scaling must be 1 because B is already multiplied."


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
