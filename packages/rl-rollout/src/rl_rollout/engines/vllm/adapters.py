"""The adapter that serves each vLLM request, from the scheduler's side."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest

from rl_core.errors import EngineError
from rl_core.weights import POLICY_ADAPTER, WeightUpdate
from rl_rollout.engines.protocol import BASE
from rl_rollout.engines.requests import missing_adapter
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.vllm.adapter_slots import FIRST_ID, wrong_adapter
from rl_rollout.engines.vllm.prompt_sharing import PromptSharing
from rl_rollout.engines.weight_checks import Shapes, module_of, place_in_layers

IN_MEMORY = "in memory, not a folder"
"""Path for vLLM, which requires one but never reads an adapter that has a slot. A number makes it the publication's."""

Running = Sequence[tuple[Sample, Any]]
"""Samples with their vLLM requests."""


class _Publication(NamedTuple):
    """A published adapter: vLLM's id, its policy version, and a number of its own."""

    adapter_id: int
    version: int
    number: int


class PublishedAdapters:
    """The adapters by their names. None before the first, and after an update of all weights."""

    def __init__(self, core: Any, shapes: Shapes, *, max_adapters: int) -> None:
        """Start without an adapter.

        Args:
            core: vLLM's core.
            shapes: The model's tensors.
            max_adapters: Number of slots with which vLLM was started; 0 if it can serve no adapters.
        """
        self._core = core
        self._max_adapters = max_adapters
        self._served: dict[str, _Publication] = {}
        self._base_version = self._num_published = 0
        self._modules: set[str] = set()
        if max_adapters:
            modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
            self._modules.update(core.collective_rpc("open_adapter_slots", args=(modules,))[0])

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

    @property
    def names(self) -> Collection[str]:
        """Names of the published adapters."""
        return self._served.keys()

    @property
    def _versions(self) -> dict[int, int]:
        return {one.adapter_id: one.version for one in self._served.values()}

    def id_of(self, update: WeightUpdate) -> int | None:
        """Return vLLM's id for an update's adapter: that of its name, or the first free one. None for all weights."""
        if update.adapter is None:
            return None
        if update.adapter.name in self._served:
            return self._served[update.adapter.name].adapter_id
        taken = self._versions
        return next(one for one in range(FIRST_ID, FIRST_ID + self._max_adapters) if one not in taken)

    def request_of(self, sample: Sample) -> LoRARequest | None:
        """Return vLLM's request for a sample's adapter. Name and path decide which keys and values are shared."""
        name = sample.adapter or POLICY_ADAPTER
        if name not in self._served:
            return None
        adapter_id, version, number = self._served[name]
        return LoRARequest(f"{name}@{version}", adapter_id, f"{IN_MEMORY} {number}")

    def affected(self, update: WeightUpdate, running: Running) -> Running:
        """Return the running samples whose keys and values an update makes invalid.

        For all weights, and with a single slot, this is `running`: vLLM then drops its whole cache.
        """
        if update.adapter is None or self._max_adapters == 1:
            return running
        return [one for one in running if (one[0].adapter or POLICY_ADAPTER) == update.adapter.name]

    def restart(self, running: Running) -> None:
        """Make vLLM compute these samples again. Others continue, because no key of its cache is used twice."""
        requests = [request for _, request in running]
        ids, scheduler = {request.request_id for request in requests}, self._core.scheduler
        if isinstance(scheduler.connector, PromptSharing):
            scheduler.connector.forget(requests)
        for request in [one for one in reversed(scheduler.running) if one.request_id in ids]:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids -= ids

    def replaced(self, update: WeightUpdate, affected: Running) -> None:
        """Record that the workers have other weights. Running samples continue with them.

        Args:
            update: The update that the workers have loaded.
            affected: The samples whose weights were replaced.
        """
        if update.adapter is None:
            self._served, self._base_version = {}, update.version
        else:
            self._num_published += 1
            adapter_id = self.id_of(update) or 0
            self._served[update.adapter.name] = _Publication(adapter_id, update.version, self._num_published)
        if self._max_adapters:
            self._follow(affected)

    def drop(self, name: str, running: Running) -> None:
        """Free an adapter's slot. Samples that did not name the policy's continue with the base.

        Raises:
            EngineError: There is no adapter of this name.
        """
        if name not in self._served:
            raise missing_adapter(name, self._served)
        self._core.collective_rpc("with_adapter", args=("drop", self._served.pop(name).adapter_id))
        affected = [one for one in running if one[0].adapter is None] if name == POLICY_ADAPTER else []
        self.restart(affected)
        self._follow(affected)

    def _follow(self, running: Running) -> None:
        for sample, request in running:
            request.lora_request = self.request_of(sample)
            request.block_hashes.clear()
            request.update_block_hashes()
        loras = {request.request_id: request.lora_request for _, request in running}
        self._core.collective_rpc("with_adapter", args=("follow", loras))

    def version_of(self, sample: Sample) -> int:
        """Return the policy version that serves a sample."""
        served = self._served.get(sample.adapter or POLICY_ADAPTER)
        return self._base_version if served is None else served.version

    def absences(self, samples: Sequence[Sample]) -> dict[Sample, str]:
        """Return the samples that cannot be served, with the reasons. Checked before each step."""
        names = {sample.adapter for sample in samples}
        found: dict[str | None, str] = {}
        for name in names - self._served.keys():
            if name not in (None, BASE):
                found[name] = str(missing_adapter(str(name), self._served))
        if self._served and names - {BASE}:
            for of_rank in self._core.collective_rpc("with_adapter", args=("absences", self._versions)):
                for name, one in self._served.items():
                    if one.adapter_id in of_rank:
                        found[name] = f"{of_rank[one.adapter_id]} Publish the weights again."
        if POLICY_ADAPTER in found:
            found[None] = found[POLICY_ADAPTER]
        return {sample: found[sample.adapter] for sample in samples if sample.adapter in found} if found else {}

    def problems(self, running: Running, affected: Running) -> Iterator[str]:
        """Describe problems after an update, other than the tensors themselves.

        Args:
            running: All samples.
            affected: Those whose weights were replaced; see `affected`.
        """
        loras = {request.request_id: self.request_of(sample) for sample, request in running}
        expected = {name: None if lora is None else lora.lora_name for name, lora in loras.items()}
        if self._max_adapters:
            ranks = self._core.collective_rpc("adapter_problems", args=(self._versions, expected))
            yield from (f"Worker {rank}: {problem}" for rank, of_rank in enumerate(ranks) for problem in of_rank)
        scheduler = self._core.scheduler
        for _, request in affected:
            if request.num_computed_tokens:
                yield f"request {request.request_id} continues with keys and values of the previous weights."
        if affected is running:
            yield from self._kept_caches()
        for request_id, name in expected.items():
            yield from wrong_adapter(request_id, scheduler.requests[request_id].lora_request, name)

    def _kept_caches(self) -> Iterator[str]:
        scheduler = self._core.scheduler
        if num := len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block):
            yield f"{num} blocks of the previous weights are still in the prefix cache."
        if isinstance(scheduler.connector, PromptSharing) and (num := scheduler.connector.num_leaders):
            yield f"{num} samples of the previous weights still share their prompts."
