"""Code inside vLLM's workers, which replaces all weights and probes the live layers.

With tensor parallelism, each rank is its own process. It gets no tensors, and reads the update's file, or receives from
its senders.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from rl_core.data import ExpertArray
from rl_core.gpus import GpuUse, own_gpu_use
from rl_core.weights import ChecksumKind, PassingChecksums, digest_tensors, tensor_checksum
from rl_core.weights.broadcast import ReceivePlan, SourceGroups
from rl_rollout.engines.vllm.adapter_slots import FIRST_ID, AdapterSlots, multiply_at_once
from rl_rollout.engines.vllm.expert_capture import ExpertStore, KeptRows
from rl_rollout.engines.vllm.image_models import serve_our_images
from rl_rollout.engines.vllm.live_weights import LiveParts, live_parts
from rl_rollout.engines.vllm.mixtures import before_reload, keep_cpu_experts, loader_names, noted
from rl_rollout.engines.vllm.prompt_scores import score_in_pieces
from rl_rollout.engines.vllm.worker_processes import unlink_what_workers_share
from rl_rollout.engines.weight_checks import Shapes, folder_tensors

if current_platform.is_cpu():
    keep_cpu_experts()  # at import, because a worker imports this module before it loads the model
serve_our_images()


WeightPlace = Mapping[str, torch.Tensor] | Path | ReceivePlan
"""The tensors of an update, a safetensors file with them, or the plan to receive them."""

OTHER = 0.7071
"""Sum of a value and its replacement in `other_values`."""


class WorkerExtension:
    """Methods added to vLLM's worker, called with `collective_rpc`."""

    model_runner: Any
    parallel_config: Any
    device: torch.device
    distributed_init_method: str
    rank: int
    _expert_store: ExpertStore
    _adapter_slots: AdapterSlots | None = None
    _noted_buffers: Mapping[str, str] = MappingProxyType({})

    @cached_property
    def _groups(self) -> SourceGroups:
        rank, num_workers = self.parallel_config.rank + 1, self.parallel_config.world_size
        return SourceGroups(rank=rank, num_workers=num_workers, device=self.device)

    def ask_weights(self, plan: ReceivePlan) -> str | None:
        """Request an update over the network, together with the other ranks. See `SourceGroups.ask`."""
        return self._groups.ask(plan)

    @torch.inference_mode()
    def replace_all_weights(
        self,
        source: WeightPlace,
        tied: Iterable[str],
        kinds: Mapping[str, ChecksumKind] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Load every tensor of the model, by Hugging Face name.

        Args:
            source: The tensors, or how to get them.
            tied: Names that the model serves from another tensor.
            kinds: Kind of checksum for each tensor; crc32c by default.

        Returns:
            Checksum of each tensor as this rank received it.
        """
        left_out = set(tied)
        with self._opened(source) as tensors, PassingChecksums(kinds) as sums:
            self._load((name, tensor) for name, tensor in sums.passing(tensors) if name not in left_out)
            return sums.result()

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        model = self.model_runner.get_model()
        kernels = before_reload(model)
        initialize_layerwise_reload(model)
        model.load_weights(noted(model, tensors))
        finalize_layerwise_reload(model, self.model_runner.model_config)
        for method, kernel in kernels.items():  # of a layer that got no weights
            method.moe_kernel = method.moe_kernel or kernel
        repack_output_head(model)
        if self._adapter_slots is not None:
            self._adapter_slots.drop()

    @torch.inference_mode()
    def load_folder(self, folder: Path, shapes: Shapes, changed: Collection[str]) -> None:
        """Load the folder's tensors in the way of an update, with other values for some of them."""
        tensors = folder_tensors(folder, shapes)
        self._load((name, other_values(tensor) if name in changed else tensor) for name, tensor in tensors)

    @torch.inference_mode()
    def live_signature(self, names: Iterable[str]) -> dict[str, str]:
        """Return digests of what this rank serves: its live layers, and all its parameters and buffers.

        Args:
            names: Names of the folder's tensors; see `live_parts`.

        Returns:
            Digests of live layers by vLLM's names, and of the others by "stored" and their path.
        """
        model = self.model_runner.get_model()
        vllm_name = loader_names(model)
        layers = live_parts(model, {vllm_name(name) for name in names})
        outputs = {name: b"".join(part.values.tobytes() for part in parts) for name, parts in layers.items()}
        stored = [*model.named_parameters(), *model.named_buffers()]
        signature = {name: hashlib.blake2b(values).hexdigest() for name, values in outputs.items()}
        return signature | {f"stored {name}": tensor_checksum(tensor) for name, tensor in stored}

    def gpu_use(self) -> list[GpuUse]:
        """Return the use of this rank's GPU since the last call; empty on a CPU."""
        return own_gpu_use("engine")

    def open_adapter_slots(self, modules: Iterable[str]) -> list[str]:
        """Prepare to serve adapters. See `AdapterSlots.served`."""
        self._adapter_slots = AdapterSlots(self.model_runner)
        if self.device.type == "cpu":
            multiply_at_once(self.model_runner)
        return self._adapter_slots.served(modules)

    @torch.inference_mode()
    def replace_adapter(self, source: WeightPlace, version: int, adapter_id: int = FIRST_ID) -> dict[str, str]:
        """Same as `replace_all_weights`, for an adapter on unchanged weights. See `AdapterSlots.replace`."""
        with self._opened(source) as tensors:
            return self._slots.replace(dict(tensors), version, adapter_id)

    @contextmanager
    def _opened(self, source: WeightPlace) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """Yield the tensors one by one. Those of a file or the network are read on demand."""
        if isinstance(source, ReceivePlan):
            yield self._groups.receive(source)
        elif isinstance(source, Mapping):
            yield source.items()
        else:
            with safe_open(source, framework="pt") as file:
                yield ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a mapping

    def with_adapter(self, method: str, *args: Any) -> Any:
        """Call a method of the worker's `AdapterSlots`."""
        return getattr(self._slots, method)(*args)

    @torch.inference_mode()
    def adapter_problems(self, versions: Mapping[int, int], expected: Mapping[str, str | None]) -> list[str]:
        """See `AdapterSlots.problems` and `AdapterSlots.misled`."""
        return [*self._slots.problems(versions), *self._slots.misled(expected)]

    @property
    def _slots(self) -> AdapterSlots:
        if self._adapter_slots is None:
            raise RuntimeError("vLLM was started without slots for adapters.")
        return self._adapter_slots

    @torch.inference_mode()
    def probe_live_weights(
        self, names: Iterable[str], with_others: bool = False, adapter_id: int | None = None
    ) -> LiveParts:
        """Return this rank's live part of each named Hugging Face tensor, and of an adapter's.

        Args:
            names: Names of tensors. Those without a live layer are omitted.
            with_others: True to return the parts of live layers that have none of these names, by vLLM's names.
            adapter_id: vLLM's id of the adapter; None for none.
        """
        model = self.model_runner.get_model()
        vllm_name = loader_names(model)
        of_vllm = {name: vllm_name(name) for name in names}
        live = live_parts(model, {*of_vllm.values()})
        found = {name: live.get(own) for name, own in of_vllm.items()}
        adapter = {} if adapter_id is None else self._slots.live_parts(adapter_id)
        others = {name: parts for name, parts in live.items() if with_others and name not in of_vllm.values()}
        return {name: parts for name, parts in found.items() if parts is not None} | others | adapter

    @torch.inference_mode()
    def note_buffers(self, names: Iterable[str] = ()) -> None:
        """Record the buffers, which a sleep must not change and no update restores.

        Args:
            names: Names of an update's tensors. Buffers among them are weights.
        """
        updated = set(map(loader_names(self.model_runner.get_model()), names))
        self._noted_buffers = {name: one for name, one in self._buffer_checksums().items() if name not in updated}

    @torch.inference_mode()
    def changed_buffers(self) -> list[str]:
        """Return the buffers that changed since they were recorded."""
        noted, self._noted_buffers = self._noted_buffers, {}
        found = self._buffer_checksums() if noted else {}
        return [
            f"buffer {name!r} changed while the engine slept, and no update restores it. Use sleep level 1."
            for name in noted
            if found.get(name) != noted[name]
        ]

    def _buffer_checksums(self) -> dict[str, str]:
        buffers = dict(self.model_runner.get_model().named_buffers())
        return {name: digest.checksum for name, digest in digest_tensors(buffers, kind="sums").items()}

    def unlink_shared(self) -> None:
        """Unlink shared memory and temporary files, so that none remain if this process is killed."""
        is_cpu = self.device.type == "cpu"  # on GPUs, a communicator may be created later
        unlink_what_workers_share(self.distributed_init_method if is_cpu else None)

    def capture_experts(self) -> None:
        """Record the experts of each token on the first rank; all ranks choose the same."""
        if self.rank == 0:
            self._expert_store = ExpertStore(self.model_runner)

    def captured_experts(self, wanted: Sequence[KeptRows]) -> list[ExpertArray] | None:
        """Return the experts of these tokens, from the rank that records them."""
        return self._expert_store.rows(wanted) if self.rank == 0 else None

    def score_in_pieces(self) -> None:
        """Score prompts with a bounded number of logits at a time, without ranking tokens. See `prompt_scores`."""
        score_in_pieces(self.model_runner)

    def draw_by_seed_and_position(self) -> None:
        """Make the CPU sampler draw each token only by its sample's seed and its position in the response.

        vLLM keeps a generator for each seeded request. On CPUs, that fails when a prompt is computed in pieces, because
        the generator cannot be rewound, and a preemption draws tokens again. Seeds are passed in `extra_args`, so that
        vLLM creates no generators.
        """
        runner = self.model_runner

        def draw(
            logits: torch.Tensor, _generators: object, k: torch.Tensor | None, p: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = apply_top_k_top_p(logits, k, p)
            tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), _row_seeds(runner, len(logits)))
            return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)

        runner.sampler.topk_topp_sampler.forward = draw


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return other finite values of the same shape and dtype, also for a tensor of zeros."""
    return (OTHER - tensor.float()).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _row_seeds(runner: Any, num_rows: int) -> torch.Tensor:
    """Return [N] int64: for each request, a number determined by its seed and the position of its next token."""
    batch = runner.input_batch
    if num_rows != batch.num_reqs:
        raise RuntimeError(f"vLLM samples {num_rows} rows for {batch.num_reqs} requests; expected one per request.")
    extras = [runner.requests[request_id].sampling_params.extra_args for request_id in batch.req_ids]
    seeds = np.array([(extra or {}).get("seed", 0) % 2**64 for extra in extras], dtype=np.uint64)
    positions = batch.num_tokens_no_spec[:num_rows] - batch.num_prompt_tokens[:num_rows]
    mixed = _splitmix64(_splitmix64(seeds) + positions.astype(np.uint64))
    return torch.from_numpy((mixed >> np.uint64(1)).astype(np.int64))


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number (Steele et al. 2014), so that adjacent numbers become unrelated."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def repack_output_head(model: torch.nn.Module) -> None:
    """Pack the output head again. On CPUs, vLLM's reload leaves one that is tied to the embeddings stale."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
