"""megatron-core's own GPT model as a side of benchmarks/gpu.py: Transformer Engine's layers, or its own on a CPU.

megatron is imported before our package, so that its fusions are compiled as for its users. Weights are its own random
ones, of a dense policy; rows of a step have equal lengths, because its batches are rectangular.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import megatron.core.distributed  # noqa: F401 - before our package
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from _learner_protocol import Outcome
from _learner_workload import OPTIMIZER, Rows
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_distill.megatron.cpu import cuda_type_names
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import ParallelOptions


class MegatronModel:
    """A model in megatron's data parallelism, and its AdamW.

    Attributes:
        budget: Maximum tokens of a micro-batch.
        layers: Implementation of the layers.
    """

    def __init__(self, config: Mapping[str, Any], *, recompute: str, device: torch.device) -> None:
        """Build the model and the optimizer.

        Args:
            config: config.json of a Qwen3.
            recompute: "none", or "full" for all layers in the backward pass.
            device: Device of the model.
        """
        self.budget = 0
        has_engine = importlib.util.find_spec("transformer_engine") is not None
        self.layers = "transformer_engine" if has_engine else "local"
        self._device = device
        self._ranks = LearnerRanks(ParallelOptions())
        with _generator_of(device):
            settings = _transformer_config(config, recompute=recompute, has_engine=has_engine)
            spec = get_gpt_layer_with_transformer_engine_spec if has_engine else get_gpt_layer_local_spec
            local = {} if has_engine else {"normalization": "RMSNorm"}
            model = GPTModel(
                settings,
                spec(qk_layernorm=True, **local),
                vocab_size=config["vocab_size"],
                max_sequence_length=config["max_position_embeddings"],
                position_embedding_type="rope",
                rotary_base=int(config["rope_parameters"]["rope_theta"]),
                share_embeddings_and_output_weights=config["tie_word_embeddings"],
            ).to(device)
        parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._model = DistributedDataParallel(settings, parallel, Float16Module(settings, model))
        adam = OptimizerConfig(
            optimizer="adam",
            lr=OPTIMIZER["learning_rate"],
            weight_decay=OPTIMIZER["weight_decay"],
            adam_beta1=OPTIMIZER["betas"][0],
            adam_beta2=OPTIMIZER["betas"][1],
            adam_eps=OPTIMIZER["eps"],
            clip_grad=OPTIMIZER["clip_grad"] if device.type == "cuda" else 0.0,  # its clipping requires CUDA
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        with cuda_type_names(list(self._model.parameters())):
            self._adam = get_megatron_optimizer(adam, [self._model], use_gloo_process_groups=False)

    def step(self, rows: Rows) -> Outcome:
        """One optimizer step."""
        self._model.zero_grad_buffer()
        self._adam.zero_grad()
        ids, mask = (torch.from_numpy(one.reshape(len(rows.lengths), -1)) for one in (rows.input_ids, rows.loss_mask))
        num_trained, losses = int(rows.loss_mask.sum()), []
        at_once = max(1, self.budget // ids.shape[1])
        for part in range(0, len(ids), at_once):
            loss = self._loss(ids[part : part + at_once], mask[part : part + at_once]) / num_trained
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        finalize_model_grads([self._model])
        _, grad_norm, _ = self._adam.step()
        return Outcome(
            loss=float(torch.stack(losses).sum()),
            grad_norm=float(grad_norm or np.nan),
            num_computed_tokens=len(rows.input_ids),
        )

    def close(self) -> None:
        """Free the model."""
        del self._model, self._adam
        self._ranks.close()

    def _loss(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the response tokens' cross entropy."""
        ids, mask = ids.to(self._device).long(), mask.to(self._device)
        labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        positions = torch.arange(ids.shape[1], device=self._device).expand_as(ids)
        found: Tensor = self._model(ids, positions, None, labels=labels)
        return (found[:, :-1] * mask[:, 1:]).sum()


def _transformer_config(config: Mapping[str, Any], *, recompute: str, has_engine: bool) -> TransformerConfig:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fused = ("bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion")
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=config["initializer_range"],
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,  # apex's
        **dict.fromkeys(fused, has_engine),
        **(again if recompute == "full" else {}),
    )


@contextmanager
def _generator_of(device: torch.device) -> Iterator[None]:
    """Draw on the GPU, if there is one: 4 billion numbers take half a minute on the CPU."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
