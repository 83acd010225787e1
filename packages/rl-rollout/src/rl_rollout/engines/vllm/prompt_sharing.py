"""A KV connector with which vLLM computes a prompt once for all of its samples.

vLLM's prefix caching shares complete blocks, of at least 32 tokens on CPUs. It shares nothing of a short prompt, and up
to 31 tokens of a long one are computed again for each of a group's samples. Here, the first scheduled sample of a
prompt is the leader. Samples that follow while it runs copy the leader's blocks in each layer just before its
attention, when the leader's keys and values of this step are already there. They compute only their prompt's last
token, for its logits.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


Shared = tuple[tuple[str, str] | None, tuple[int, ...], tuple[str, ...]]
"""What samples must share: the publication of the adapter, the prompt, and its images."""


@dataclass
class BlockCopies(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not typed
    """Blocks to copy in this step, one by one."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptSharing(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is not typed
    """Both sides of the connector: the scheduler's plans the copies, the worker's makes them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Start without leaders."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._leaders: dict[Shared, Request] = {}
        self._planned = BlockCopies()
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)

    # the scheduler's side

    @property
    def num_leaders(self) -> int:
        """Number of samples whose prompts others copy."""
        return len(self._leaders)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of prompt tokens without the last, if a leader runs.

        A sample that restarts after a preemption does not follow. It also computes tokens of its response, which the
        copied block would overwrite.
        """
        if request.num_tokens > request.num_prompt_tokens:
            return 0, False
        leader = self._leaders.get(_shared(request))
        if leader is None or leader is request or leader.status != RequestStatus.RUNNING:
            return 0, False
        return max(request.num_prompt_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Plan the copies of a follower. A sample that computes its whole prompt leads from now on.

        A leader's prompt is complete at the end of this step. A truncated one uses all remaining tokens of the step,
        and no sample follows it until it is scheduled again.
        """
        shared = _shared(request)
        if not num_external_tokens:
            self._leaders[shared] = request
            return
        num_tokens = request.num_prompt_tokens - 1
        first = (num_tokens - num_external_tokens) // self._block_size
        last = -(-num_tokens // self._block_size)
        (sources,) = self._kv_cache_manager.get_block_ids(self._leaders[shared].request_id)
        (targets,) = blocks.get_block_ids()
        self._planned.sources.extend(sources[first:last])
        self._planned.targets.extend(targets[first:last])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockCopies:  # noqa: ARG002 - vLLM's interface
        """Return the copies of this step."""
        planned, self._planned = self._planned, BlockCopies()
        return planned

    def request_finished(
        self,
        request: Request,
        block_ids: list[int],  # noqa: ARG002 - vLLM's interface
    ) -> tuple[bool, dict[str, Any] | None]:
        """Remove a leader that ended."""
        shared = _shared(request)
        if self._leaders.get(shared) is request:
            del self._leaders[shared]
        return False, None

    def reset_cache(self) -> bool:
        """Forget all leaders, because their weights were replaced."""
        self._leaders.clear()
        return True

    def forget(self, requests: Collection[Request]) -> None:
        """Forget these leaders, because the weights of their adapter were replaced."""
        ids = {request.request_id for request in requests}
        self._leaders = {shared: one for shared, one in self._leaders.items() if one.request_id not in ids}

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Store the caches, [blocks, ...] by layer."""
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's interface
        """Read this step's plan."""
        plan = self._get_connector_metadata()
        self._sources = torch.tensor(plan.sources, dtype=torch.int64)
        self._targets = torch.tensor(plan.targets, dtype=torch.int64)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy one layer's blocks. Its keys and values of this step are written."""
        if len(self._sources):
            cache = self._kv_caches[layer_name]
            cache.index_copy_(0, self._targets, cache.index_select(0, self._sources))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """End the step. The next one has its own plan."""
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)


def _shared(request: Request) -> Shared:
    lora = request.lora_request
    adapter = None if lora is None else (lora.lora_name, lora.lora_path)
    images = tuple(feature.identifier for feature in request.mm_features)
    return adapter, tuple(request.prompt_token_ids or ()), images
