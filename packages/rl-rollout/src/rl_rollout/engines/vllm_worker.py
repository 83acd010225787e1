"""What runs inside vLLM's worker: replacing all weights, and asking the live layers what they serve.

vLLM's CPU layers pack their weights and drop the originals, GPU layers fuse them. So what is served is
not read but asked: each live layer is applied to the probe vector, and its output is split where the
Hugging Face tensors were joined.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from rl_core.records import FloatArray
from rl_core.weights import probe_tensor, probe_vector


class WorkerExtension:
    """Mixed into vLLM's worker; called with `collective_rpc`."""

    model_runner: Any

    @torch.inference_mode()
    def replace_all_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load every tensor of the model, by Hugging Face name."""
        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        model.load_weights(tensors.items())
        finalize_layerwise_reload(model, self.model_runner.model_config)
        repack_output_head(model)

    @torch.inference_mode()
    def probe_live_weights(self, names: Iterable[str]) -> dict[str, FloatArray]:
        """Probe of each named Hugging Face tensor as it is served now; names that have no live layer are left out."""
        model = self.model_runner.get_model()
        live = dict(_live_probes(model))
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            mapper = replace(mapper, orig_to_new_stacked={})  # the probes are split, hence named as in the checkpoint
        found = {name: live.get(_vllm_name(mapper, name)) for name in names}
        return {name: probe for name, probe in found.items() if probe is not None}

    def skip_token_ranks(self) -> None:
        """Let the sampler gather the sampled tokens' logprobs alone.

        vLLM also ranks each token among the vocabulary, with a function that torch compiles: seconds at the
        first batch on a CPU, for a number that nobody here reads.
        """
        sampler = self.model_runner.sampler
        gather_all = sampler.gather_logprobs

        def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
            if num_logprobs:
                return gather_all(logprobs, num_logprobs, token_ids)
            columns = token_ids.unsqueeze(-1)
            return LogprobsTensors(columns.to(torch.int32), logprobs.gather(-1, columns), torch.zeros_like(token_ids))

        sampler.gather_logprobs = gather

    def draw_by_seed_and_position(self) -> None:
        """Let the sampler on a CPU draw each token by its sample's seed and its position in the response alone.

        vLLM keeps a generator for each seeded request, which on CPUs fails when a prompt is computed in pieces (it
        cannot be wound back), and draws anew what a preemption repeats. Seeds come in `extra_args`, so that vLLM
        makes no generators.
        """
        runner = self.model_runner

        def draw(
            logits: torch.Tensor, _generators: object, k: torch.Tensor | None, p: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = apply_top_k_top_p(logits, k, p)
            tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), _row_seeds(runner, len(logits)))
            return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)

        runner.sampler.topk_topp_sampler.forward = draw


def _row_seeds(runner: Any, num_rows: int) -> torch.Tensor:
    """[N] int64: for each request of the batch a number that its seed and the position of its next token decide."""
    batch = runner.input_batch
    if num_rows != batch.num_reqs:
        raise RuntimeError(f"vLLM samples {num_rows} rows for {batch.num_reqs} requests; expected one a request.")
    extras = [runner.requests[request_id].sampling_params.extra_args for request_id in batch.req_ids]
    seeds = np.array([extra["seed"] % 2**64 if extra else 0 for extra in extras], dtype=np.uint64)
    positions = batch.num_tokens_no_spec[:num_rows] - batch.num_prompt_tokens[:num_rows]
    mixed = _splitmix64(_splitmix64(seeds) + positions.astype(np.uint64))
    return torch.from_numpy((mixed >> np.uint64(1)).astype(np.int64))


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number (Steele et al. 2014), so that neighbours have nothing in common."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def repack_output_head(model: torch.nn.Module) -> None:
    """Pack the output head anew: vLLM's reload leaves one that is tied to the embeddings stale on CPUs."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _live_probes(model: torch.nn.Module) -> Iterator[tuple[str, FloatArray]]:
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield from _linear_probes(path, module, packed)
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{path}.weight", _vocabulary_probe(module)
        else:
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                yield name, probe_tensor(parameter)


def _linear_probes(path: str, module: LinearBase, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, FloatArray]]:
    parent, _, own_name = path.rpartition(".")
    names = packed.get(own_name, [own_name])
    sizes = module.output_partition_sizes if len(names) > 1 else [module.output_size]
    outputs = _apply(module, module.input_size)
    for name, part in zip(names, torch.split(outputs, sizes), strict=True):
        yield f"{parent}.{name}.weight", part.numpy()
    if module.bias is not None:
        for name, part in zip(names, torch.split(module.bias.detach().float().cpu(), sizes), strict=True):
            yield f"{parent}.{name}.bias", part.numpy()


def _vocabulary_probe(module: VocabParallelEmbedding) -> FloatArray:
    size = module.org_vocab_size
    if isinstance(module, ParallelLMHead):
        return _apply(module, module.embedding_dim)[:size].numpy()
    return probe_tensor(module.weight[:size])


def _apply(module: Any, input_size: int) -> torch.Tensor:
    """[out] float32: the live layer, packed as it is, on the probe vector."""
    vector = probe_vector(input_size).to(device=module.weight.device, dtype=module.weight.dtype)
    output: torch.Tensor = module.quant_method.apply(module, vector.unsqueeze(0))
    return output.squeeze(0).float().cpu()


def _vllm_name(mapper: Any, name: str) -> str:
    if mapper is None:
        return name
    names: list[str] = mapper.apply_list([name])
    return names[0] if names else name
