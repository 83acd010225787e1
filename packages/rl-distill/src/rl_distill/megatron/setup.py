"""Build this rank's part of a model: chunks, weights, and Megatron's data parallelism around them."""

import fnmatch
import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from rl_core.weights import LORA_B
from rl_distill.architecture.lora_targets import adapted_modules
from rl_distill.architecture.tensor_shapes import output_name
from rl_distill.checkpoints.checkpoint import DTYPES, PolicySource
from rl_distill.checkpoints.hf_folder import PolicyTensors
from rl_distill.checkpoints.peft_folder import read_adapter
from rl_distill.megatron.any_model.chunk import TransformersModel
from rl_distill.megatron.any_model.sharded import shard_model
from rl_distill.megatron.attention.varlen import use_newest_kernels
from rl_distill.megatron.convert import Shard, TensorBlock, blocks_of, held_blocks
from rl_distill.megatron.kernels import PolicyTransformerConfig, chosen_kernels
from rl_distill.megatron.lora import PARAMETER
from rl_distill.megatron.model import Head, PolicyModel
from rl_distill.megatron.model_spec import transformer_config
from rl_distill.megatron.overlap import connect_schedule, data_parallelism
from rl_distill.megatron.parallel import undisturbed_random_numbers
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

VALUE_HEAD = {"value_head.weight": "score.weight", "value_head.bias": "score.bias"}
"""Tensors of a critic's head: Megatron's name to the name in a Hugging Face token classifier with one label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A model to build on every rank.

    Attributes:
        source: Source of the weights and the configuration.
        options: Learner options; dtype, seed, kernels, recomputation and parallelism settings are used here.
        parallel: Parallel layout of the ranks.
        head: Output of the model: token scores or values.
        trains: False builds neither gradients nor an optimizer.
        lora: Adapter that trains instead of the weights; rank 0 for none.
        average_decay: Share of the moving average of the weights that each step keeps; 0 keeps no average.
    """

    source: PolicySource
    options: LearnerOptions
    parallel: ParallelOptions
    head: Head = "policy"
    trains: bool = True
    lora: LoraOptions = field(default_factory=LoraOptions)
    average_decay: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return DTYPES[self.options.dtype]


def build_chunks(plan: ModelPlan, shards: list[Shard], *, device: torch.device) -> list[Any]:
    """Build this rank's model chunks and load their weights.

    Args:
        plan: The model to build.
        shards: One shard per chunk.
        device: Device of the chunks.

    Returns:
        One entry per chunk: Megatron's DistributedDataParallel around a model, or the model itself if it is frozen or
        FSDP divides it.

    Raises:
        DataError: A file or tensor is missing, incomplete or of the wrong shape.
        SettingsError: The requested kernels are not available on the device.
    """
    config = _configuration(plan, device=device)
    is_virtual = len(shards) > 1
    chunks = []
    for index, shard in enumerate(shards):
        # Weights that are not filled yet use no host memory, so a model to divide never exists as a whole.
        start = torch.device("cpu") if plan.parallel.shard_weights else device
        with undisturbed_random_numbers(), warnings.catch_warnings(), start:
            warnings.simplefilter("ignore", DeprecationWarning)  # about Megatron's calls of its own functions
            model: Any = (
                TransformersModel(plan.source.config, config, head=plan.head, lora=plan.lora, dtype=_kept_dtype(plan))
                if plan.source.config.model_json
                else PolicyModel(
                    plan.source.config,
                    config,
                    shard=shard,
                    virtual_stage=index if is_virtual else None,
                    head=plan.head,
                    lora=plan.lora,
                )
            )
        if plan.parallel.shard_weights:
            shard_model(model, plan.dtype, device=device)
        with torch.no_grad():
            fill_weights(model, plan, shard)
            if plan.lora.rank:
                fill_adapter(_adapter_alone(model), plan, shard, rank=plan.lora.rank)
        if plan.parallel.shard_weights:
            chunks.append(model)
            continue
        model = model.to(device)  # for layers that ignore the device context, such as Transformer Engine's
        if plan.dtype != torch.float32 and not plan.source.config.model_json:  # its buffers stay in float32
            model = Float16Module(config, model)
        chunks.append(model)
    if not plan.trains:
        return [chunk.requires_grad_(False) for chunk in chunks]
    if plan.parallel.shard_weights:
        return chunks
    ddp = data_parallelism(plan.options, plan.parallel, chunks)
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    connect_schedule(wrapped)
    return wrapped


def _kept_dtype(plan: ModelPlan) -> torch.dtype:
    """Return the dtype of a rank's weights, which are the optimizer's float32 weights if FSDP divides them."""
    return torch.float32 if plan.parallel.shard_weights and plan.trains else plan.dtype


def _configuration(plan: ModelPlan, *, device: torch.device) -> PolicyTransformerConfig:
    options, head_dim = plan.options, plan.source.config.head_dim
    kernels = chosen_kernels(options.kernels, device=device, dtype=plan.dtype, head_dim=head_dim)
    if kernels.attention == "varlen" and device.type == "cuda":
        use_newest_kernels(device, dtype=plan.dtype, head_dim=head_dim)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "If you are using transformer_engine")  # about core_attn
        return transformer_config(
            plan.source.config,
            dtype=plan.dtype,
            init_method=_keep,
            parallel=plan.parallel,
            recompute=options.recompute == "full" and plan.trains,
            recompute_modules=options.recompute_modules if options.recompute == "selective" and plan.trains else (),
            kernels=kernels,
        )


def fill_weights(model: torch.nn.Module, plan: ModelPlan, shard: Shard) -> None:
    """Fill a chunk's parameters from the policy's folder, or with random numbers that are the same in every layout."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if PARAMETER not in name}
    folder = plan.source.policy_dir
    unused = frozenset({output_name(plan.source.config)}) if plan.head == "value" else frozenset()
    tensors = None if folder is None else PolicyTensors(folder, plan.source.config, optional=unused)
    for parameter in parameters.values():
        parameter.zero_()  # rows that pad the vocabulary stay zero
    for block in chunk_blocks(parameters, plan, shard):
        dtype = plan.dtype if block.is_divided else block.view.dtype
        if tensors is not None and (block.name in tensors or block.name not in VALUE_HEAD.values()):
            block.write(tensors.read(block.name, block.offsets, block.sizes, dtype=dtype))
        elif tensors is None and block.name not in VALUE_HEAD.values():
            whole = random_tensor(block.name, block.shape, plan).to(dtype)
            block.write(whole[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))])


def _adapter_alone(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Let only the adapter of a chunk train, and return A and B by name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(PARAMETER in name)
    return {name: parameter for name, parameter in model.named_parameters() if PARAMETER in name}


def fill_adapter(
    adapter: Mapping[str, Tensor], plan: ModelPlan, shard: Shard, *, rank: int, frozen: Sequence[str] = ()
) -> None:
    """Fill a chunk's A and B from the adapter's folder; without one, B is 0 as in peft.

    A is 0 beyond a rank, and in matrices whose name matches a pattern of `frozen`.
    """
    saved = None
    if plan.lora.path is not None:
        saved = read_adapter(plan.lora.path, plan.lora, adapted_modules(plan.source.config, plan.lora))
    for block in chunk_blocks(adapter, plan, shard):
        of_block = 0 if any(fnmatch.fnmatchcase(block.name, one) for one in frozen) else rank
        whole = _first_adapter(block, plan, rank=of_block) if saved is None else saved[block.name]
        block.write(whole[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))])


def _first_adapter(block: TensorBlock, plan: ModelPlan, *, rank: int) -> Tensor:
    """Return a whole float32 adapter matrix: A as torch.nn.Linear's weight, from its name and the seed; B zero."""
    if block.name.endswith(LORA_B):
        return torch.zeros(block.shape)
    bound = 1.0 / math.sqrt(block.shape[1])
    whole = torch.empty(block.shape).uniform_(-bound, bound, generator=_generator(block.name, plan))
    whole[rank:] = 0.0
    return whole


def chunk_blocks(state: Mapping[str, Tensor], plan: ModelPlan, shard: Shard) -> list[TensorBlock]:
    """Return the blocks of a chunk's tensors, including those of a critic's head."""
    policy = {name: tensor for name, tensor in state.items() if name not in VALUE_HEAD}
    blocks = blocks_of(policy, plan.source.config, shard)
    for name in (name for name in VALUE_HEAD if name in state):  # the order of a set differs between processes
        blocks += held_blocks(VALUE_HEAD[name], state[name], is_primary=shard.tensor_rank == 0)
    return blocks


def random_tensor(name: str, shape: tuple[int, ...], plan: ModelPlan) -> Tensor:
    """Return a whole float32 random weight that depends only on its name and the seed."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return torch.empty(shape).normal_(0.0, plan.source.config.initializer_range, generator=_generator(name, plan))


def _generator(name: str, plan: ModelPlan) -> torch.Generator:
    digest = hashlib.sha256(f"{plan.options.seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _keep(tensor: Tensor) -> Tensor:
    """Skip Megatron's initialization, because the weight is filled afterwards."""
    return tensor
