"""The adapter that serves each vLLM request, from the scheduler's side."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.lora.request import LoRARequest

from rl_core.errors import EngineError
from rl_core.weights import WeightUpdate
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.vllm.adapter_slot import ADAPTER_ID, wrong_adapter
from rl_rollout.engines.vllm.prompt_sharing import PromptSharing
from rl_rollout.engines.weight_checks import Shapes, module_of, place_in_layers

IN_MEMORY = "in memory, not a folder"
"""Path for vLLM, which requires one but never reads an adapter that has a slot."""


class PublishedAdapter:
    """The last published adapter. None before the first, and after an update of all weights.

    Attributes:
        version: Policy version; None without an adapter.
        base_version: Policy version of the base weights.
    """

    def __init__(self, core: Any, shapes: Shapes, *, can_serve: bool) -> None:
        """Start without an adapter.

        Args:
            core: vLLM's core.
            shapes: The model's tensors.
            can_serve: Whether vLLM was started with slots for adapters.
        """
        self._core = core
        self._can_serve = can_serve
        self.version: int | None = None
        self.base_version = 0
        self._modules: set[str] = set()
        if can_serve:
            modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
            self._modules.update(core.collective_rpc("open_adapter_slot", args=(modules,))[0])

    def check_modules(self, names: Iterable[str]) -> None:
        """Refuse an adapter for modules without slots in vLLM, before anything changes.

        Args:
            names: Names of its tensors.

        Raises:
            EngineError: A module has no slot. The message names it.
        """
        served = {*map(place_in_layers, self._modules)}
        if unserved := sorted({module for module in map(module_of, names) if place_in_layers(module) not in served}):
            raise EngineError(
                f"vLLM was started without a slot for an adapter of {unserved[0]}. Add the last part of its name to "
                f"lora_target_modules (VLLMOptions); experts are not supported. {len(unserved)} modules have no slot."
            )

    def request_of(self, sample: Sample) -> LoRARequest | None:
        """Return vLLM's request for a sample's adapter. Its name decides which keys and values are shared."""
        if self.version is None or sample.adapter == "base":
            return None
        return LoRARequest(f"policy@{self.version}", ADAPTER_ID, IN_MEMORY)

    def replaced(self, update: WeightUpdate, running: Sequence[tuple[Sample, Any]]) -> None:
        """Record that the workers have other weights. Running samples continue with them.

        Args:
            update: The update that the workers have loaded.
            running: Each sample with its vLLM request.
        """
        self.version = None if update.adapter is None else update.version
        if update.adapter is None:
            self.base_version = update.version
        if self._can_serve:
            self._follow(running)

    def _follow(self, running: Sequence[tuple[Sample, Any]]) -> None:
        for sample, request in running:
            request.lora_request = self.request_of(sample)
            request.block_hashes.clear()
            request.update_block_hashes()
        loras = {request.request_id: request.lora_request for _, request in running}
        self._core.collective_rpc("with_adapter", args=("follow", loras))

    def version_of(self, sample: Sample, version: int) -> int:
        """Return the policy version that serves a sample after `version` was published."""
        return self.base_version if sample.adapter == "base" else version

    def absence(self, samples: Iterable[Sample]) -> str | None:
        """Return why samples can no longer be served, if one of them needs the adapter. Checked before each step."""
        if self.version is None or not any(self.request_of(sample) for sample in samples):
            return None
        absences = self._core.collective_rpc("with_adapter", args=("absence", self.version))
        return next((absence for absence in absences if absence is not None), None)

    def problems(self, running: Sequence[tuple[Sample, Any]]) -> Iterator[str]:
        """Describe problems after an update, other than the tensors themselves.

        Args:
            running: Each sample with its vLLM request.
        """
        loras = {request.request_id: self.request_of(sample) for sample, request in running}
        expected = {name: None if lora is None else lora.lora_name for name, lora in loras.items()}
        if self._can_serve:
            ranks = self._core.collective_rpc("adapter_problems", args=(self.version, expected))
            yield from (f"Worker {rank}: {problem}" for rank, of_rank in enumerate(ranks) for problem in of_rank)
        scheduler = self._core.scheduler
        if num := len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block):
            yield f"{num} blocks of the previous weights are still in the prefix cache."
        if isinstance(scheduler.connector, PromptSharing) and (num := scheduler.connector.num_leaders):
            yield f"{num} samples of the previous weights still share their prompts."
        for request_id, name in expected.items():
            yield from wrong_adapter(request_id, scheduler.requests[request_id].lora_request, name)
