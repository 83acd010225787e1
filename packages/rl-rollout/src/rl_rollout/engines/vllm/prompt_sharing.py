"""A KV connector with which vLLM computes a prompt once for all samples that have it.

vLLM's prefix caching shares whole blocks, of at least 32 tokens on CPUs: of a short prompt nothing, and of a
long one up to 31 tokens less, for each of a group's samples again. Here the first sample of a prompt that is
scheduled leads. Those that follow while it runs take the leader's blocks as they are, copied in each layer just
before its attention, when the leader's keys and values of this step are already there. They compute their
prompt's last token alone, to have its logits.
"""

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


Shared = tuple[str | None, tuple[int, ...]]
"""What samples must have in common: the adapter with its version, and the prompt."""


@dataclass
class BlockCopies(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not typed
    """Blocks to copy in this step, one by one."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptSharing(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is not typed
    """Both sides of the connector: the scheduler's, which plans the copies, and the worker's, which makes them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Begin without leaders."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._leaders: dict[Shared, Request] = {}
        self._planned = BlockCopies()
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)

    # the scheduler's side

    @property
    def num_leaders(self) -> int:
        """Samples whose prompts others take."""
        return len(self._leaders)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of the prompt but its last, when a leader runs.

        A sample that starts again after a preemption does not follow: it computes tokens of its response too, over
        which the leader's block would be copied.
        """
        if request.num_tokens > request.num_prompt_tokens:
            return 0, False
        leader = self._leaders.get(_shared(request))
        if leader is None or leader is request or leader.status != RequestStatus.RUNNING:
            return 0, False
        return max(request.num_prompt_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Plan the copies of a sample that follows; a sample that computes its whole prompt leads from now on.

        A leader's prompt is complete by the end of this step: one that is cut short takes all that is left of the
        step's tokens, and nobody follows it until it is scheduled again.
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
        """The copies of this step."""
        planned, self._planned = self._planned, BlockCopies()
        return planned

    def request_finished(
        self,
        request: Request,
        block_ids: list[int],  # noqa: ARG002 - vLLM's interface
    ) -> tuple[bool, dict[str, Any] | None]:
        """A leader that ends leads no more."""
        shared = _shared(request)
        if self._leaders.get(shared) is request:
            del self._leaders[shared]
        return False, None

    def reset_cache(self) -> bool:
        """Forget all leaders: their weights are gone."""
        self._leaders.clear()
        return True

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, [blocks, ...] by layer."""
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's interface
        """Read this step's plan."""
        plan = self._get_connector_metadata()
        self._sources = torch.tensor(plan.sources, dtype=torch.int64)
        self._targets = torch.tensor(plan.targets, dtype=torch.int64)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy one layer's blocks; its keys and values of this step are written."""
        if len(self._sources):
            cache = self._kv_caches[layer_name]
            cache.index_copy_(0, self._targets, cache.index_select(0, self._sources))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """The step is over; the next has a plan of its own."""
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)


def _shared(request: Request) -> Shared:
    adapter = None if request.lora_request is None else request.lora_request.lora_name
    return adapter, tuple(request.prompt_token_ids or ())
