"""Records the experts that each token used, in vLLM's worker, for its scheduler.

A token's experts are stored by KV slot, like its keys and values. A sample that reuses blocks from the prefix cache
therefore gets the experts of the pass that computed them. Rows are read before a preemption frees their blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCaptureSource,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from rl_core.data import ExpertArray
from rl_core.errors import EngineError
from rl_rollout.engines.vllm.prompt_sharing import BlockCopies

WITH_EXPERTS = "with_experts"
"""Key of a scoring request's extra arguments: whether to report experts."""


class KeptRows(NamedTuple):
    """Rows of one request.

    Attributes:
        request_id: vLLM's request id.
        blocks: KV blocks of the request.
        start: Index of the first token.
        stop: Index after the last token.
    """

    request_id: str
    blocks: list[int]
    start: int
    stop: int


class ExpertStore:
    """The worker's side: the experts of each token in the KV cache."""

    def __init__(self, runner: Any) -> None:
        """Make the routers of a model runner report their choices."""
        kv_cache, self._group = runner.kv_cache_config, whole_group(runner.kv_cache_config)
        self._runner = runner
        self._block_size: int = kv_cache.kv_cache_groups[self._group].kv_cache_spec.block_size
        model, config = runner.get_model(), runner.model_config
        routed = [each for each in model.modules() if isinstance(each, MoERunner | RoutedExpertsCaptureSource)]
        self._layers: list[int] = sorted(each.layer_id for each in routed)
        self._shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        slots = kv_cache.num_blocks * self._block_size, len(self._layers), self._shape[1]
        self._slots = torch.full(slots, -1, dtype=torch.int16, device=runner.device)
        self._chosen: dict[int, torch.Tensor] = {}
        bind_routed_experts_capturer(model, self)
        execute = runner.execute_model

        def execute_and_keep(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            output = execute(scheduler_output, *args, **kwargs)
            self._keep(scheduler_output)
            return output

        runner.execute_model = execute_and_keep

    def capture(self, layer: int, chosen: torch.Tensor) -> None:
        """Keep a router's choices, [tokens, top_k], until the step ends. Called by vLLM."""
        self._chosen[layer] = chosen

    @torch.inference_mode()
    def rows(self, wanted: Sequence[KeptRows]) -> list[ExpertArray]:
        """Return the experts of these tokens."""
        slots = []
        for _, blocks, start, stop in wanted:
            position = np.arange(start, stop)
            slots.append(
                np.asarray(blocks)[position // self._block_size] * self._block_size + position % self._block_size
            )
        index = torch.from_numpy(np.concatenate(slots)).to(self._slots.device)
        found = np.full((len(index), *self._shape), -1, np.int16)
        found[:, self._layers] = self._slots.index_select(0, index).cpu().numpy()
        return np.split(found, np.cumsum([len(one) for one in slots])[:-1])

    @torch.inference_mode()
    def _keep(self, scheduler_output: SchedulerOutput) -> None:
        """Store a step's rows at the slots of its keys and values, and copy rows of copied blocks."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if not num_tokens:
            return
        slots = self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:num_tokens]
        rows = torch.stack([self._chosen[layer] for layer in self._layers], 1)[:num_tokens].to(torch.int16)
        self._slots.index_copy_(0, slots, rows)
        copies = scheduler_output.kv_connector_metadata
        if isinstance(copies, BlockCopies) and copies.sources:
            blocks = self._slots.view(-1, self._block_size, *self._slots.shape[1:])
            blocks[copies.targets] = blocks[copies.sources]
            self._slots.index_copy_(0, slots, rows)  # rows that a sample computed itself override its leader's


class ExpertRows:
    """The scheduler's side. It replaces vLLM's connector for such outputs, which requires vLLM's second model runner.

    A row is kept from the first pass whose logprob was sampled. Before a request loses its blocks (because it ended,
    was aborted or preempted, or its weights are replaced), the missing rows are read.
    """

    def __init__(
        self, scheduler: Any, ask: Callable[[Sequence[KeptRows]], list[ExpertArray]], shape: tuple[int, int]
    ) -> None:
        """Attach to a scheduler.

        Args:
            scheduler: vLLM's scheduler.
            ask: Returns rows of the `ExpertStore`.
            shape: Number of layers, and of experts per token.
        """
        self._ask = ask
        self._shape = shape
        self._blocks = scheduler.kv_cache_manager.get_block_ids
        self._group = whole_group(scheduler.kv_cache_config)
        self._to_ask: list[KeptRows] = []
        self._known: dict[str, list[ExpertArray]] = {}
        self._num_known: dict[str, int] = {}
        scheduler.aux_output_connector = self

    def pop(self, request_id: str, num_tokens: int) -> ExpertArray:
        """Return the [num_tokens, layers, top_k] rows of an ended request; -1 where unknown."""
        self._fetch()
        num_unknown = num_tokens - self._num_known.pop(request_id, 0)
        unknown = np.full((num_unknown, *self._shape), -1, np.int16)
        return np.concatenate([*self._known.pop(request_id, ()), unknown])

    def request_finished(self, request: Request) -> None:
        """Read the rows of a request that is about to lose its blocks. Called by vLLM."""
        start, stop = self._num_known.get(request.request_id, 0), request.num_computed_tokens
        params = request.sampling_params
        is_left_out = params.prompt_logprobs is not None and not (params.extra_args or {}).get(WITH_EXPERTS)
        if is_left_out or not request.num_output_tokens or start >= stop:
            return  # rows from before the first sampled token are computed again
        blocks = self._blocks(request.request_id)[self._group]
        self._to_ask.append(KeptRows(request.request_id, blocks, start, stop))
        self._num_known[request.request_id] = stop

    def build_connector_meta(self, scheduler_output: SchedulerOutput, requests: Any) -> None:  # noqa: ARG002 - vLLM's interface
        """Fetch rows before the next planned step overwrites freed blocks. Called by vLLM."""
        self._fetch()

    def take_output(self, request: Request, output: Any) -> None:
        """Return nothing, because steps have no such output. Called by vLLM."""

    def reset(self) -> None:
        """Do nothing when the prefix cache was emptied. Called by vLLM."""

    def _fetch(self) -> None:
        wanted, self._to_ask = self._to_ask, []
        if wanted:
            for one, rows in zip(wanted, self._ask(wanted), strict=True):
                self._known.setdefault(one.request_id, []).append(rows)


def whole_group(kv_cache: KVCacheConfig) -> int:
    """Return the index of the KV cache group that keeps every token.

    Raises:
        EngineError: There is no such group.
    """
    for index, group in enumerate(kv_cache.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return index
    raise EngineError(
        "the experts of tokens are stored by KV slot, but no layer of this model keeps the keys and values of all "
        "tokens. Set capture_experts = false (VLLMOptions); training then chooses experts again."
    )
