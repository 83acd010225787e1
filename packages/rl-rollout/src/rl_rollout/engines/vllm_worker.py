"""What runs inside vLLM's worker: replacing all weights, and asking the live layers what they serve.

vLLM's CPU layers pack their weights and drop the originals, GPU layers fuse them. So what is served is
not read but asked: each live layer is applied to the probe vector, and its output is split where the
Hugging Face tensors were joined.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.outputs import LogprobsTensors

from rl_core.records import FloatArray
from rl_core.weights import probe_tensor, probe_vector


class WeightExtension:
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
