"""Adam of a rank, with Muon if chosen: clipping, learning rate and state, optionally sharded over ranks; offloading."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_distill.megatron.convert import TensorBlock
from rl_distill.megatron.cpu import cuda_type_names
from rl_distill.megatron.muon import HiddenMatrices, muon_step
from rl_distill.megatron.parallel import group_of_copies
from rl_distill.options import AdamOptions, LearnerOptions
from rl_distill.stepping import clip_scale

Parameters = Mapping[str, torch.nn.Parameter]

MOMENTS, AVERAGE = ("exp_avg", "exp_avg_sq"), "average"
"""Names in the optimizer's state: Adam's moments, and the moving average of a float32 weight."""


@dataclass(frozen=True, slots=True)
class Main:
    """The optimizer's view of a parameter on this rank.

    Attributes:
        tensor: Float32 tensor that the optimizer updates; None if it is entirely on other ranks.
        inner: torch optimizer that has its state; None if it is entirely on other ranks.
        start: Offset of the tensor in the flattened parameter if ranks shard it.
        is_shared: True if each data-parallel rank has a slice of the flattened parameter.
    """

    tensor: Tensor | None
    inner: torch.optim.Optimizer | None
    start: int
    is_shared: bool


class RankAdam(ABC):
    """Mixed-precision AdamW over a rank's parameters, without weight decay on norms and biases.

    Attributes:
        kinds: Names of the state of each parameter that a checkpoint keeps.
    """

    kinds: tuple[str, ...] = MOMENTS

    def __init__(self, mains: Mapping[torch.nn.Parameter, Main]) -> None:
        """Keep what the optimizers of the parameters update, by parameter."""
        self._mains = mains
        self._matrices: list[HiddenMatrices] = []
        self._average_decay = 0.0
        self._on_host: Offloaded | None = None

    def use_muon(self, parameters: Iterable[tuple[torch.nn.Parameter, Callable[[Tensor], list[TensorBlock]]]]) -> None:
        """Train these parameters with Muon; each comes with a function that returns the matrices in its tensors."""
        for parameter, blocks in parameters:
            main = self._mains[parameter]
            if main.tensor is not None and main.inner is not None:
                self._matrices.append(HiddenMatrices(main.tensor, main.inner, blocks))

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this rank's gradients, always in the same order."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the global norm of the summed gradients, and prepare them for `step`."""

    @contextmanager
    def adding(self, *, has_gradients: bool) -> Iterator[None]:
        """Add the gradients computed inside the context to the earlier ones, which an error inside leaves unchanged.

        Ranks sum all gradients that they hold, so earlier sums are set aside meanwhile.

        Args:
            has_gradients: There are earlier gradients; otherwise the context starts from zeros.
        """
        earlier = [gradient.clone() for gradient in self.gradients()] if has_gradients else []
        self.zero_grad()
        try:
            yield
        except BaseException:
            self.zero_grad()
            raise
        finally:
            if earlier:
                torch._foreach_add_(self.gradients(), earlier)

    @abstractmethod
    def inner(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the torch optimizers that have parameters on this rank."""

    @abstractmethod
    def _apply(self) -> None:
        """Update the weights by the prepared gradients."""

    def step(self, grad_norm: float, options: AdamOptions) -> None:
        """Clip the gradients and update the weights.

        Args:
            grad_norm: Result of `grad_norm`.
            options: Settings of this step.
        """
        for inner in self.inner():
            for group in inner.param_groups:
                group["lr"], group["betas"], group["eps"] = options.learning_rate, options.betas, options.eps
                # Megatron applies wd_mult, which exempts norms, only in its own scheduler.
                group["weight_decay"] = options.weight_decay * group["wd_mult"]
        scale = clip_scale(grad_norm, options.clip_grad)
        if scale < 1.0:  # Megatron's clipping requires CUDA tensors
            grads = [p.grad for inner in self.inner() for group in inner.param_groups for p in group["params"]]
            torch._foreach_mul_([grad for grad in grads if grad is not None], scale)
        with self.on_device():
            muon_step(self._matrices, options)
            self._apply()
            for tensor, state in self._states() if self._average_decay else ():
                state[AVERAGE].lerp_(tensor.detach(), 1 - self._average_decay)

    def keep_average(self, decay: float) -> None:
        """Keep a moving average of the float32 weights, which starts from them; each step keeps this share."""
        self._average_decay, self.kinds = decay, (*MOMENTS, AVERAGE)
        self.start_moments()
        for tensor, state in self._states():
            state.setdefault(AVERAGE, tensor.detach().clone())

    def keep_on_host(self) -> None:
        """Keep moments and float32 weights in host memory from now on, except during `step` and `on_device`."""
        if self._on_host is None:
            self._on_host = Offloaded(self.tensors(), [])

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make moments and float32 weights available on their device inside the context."""
        if self._on_host is None:
            yield
            return
        self._on_host.restore()
        try:
            yield
        finally:
            self._on_host = Offloaded(self.tensors(), [])

    def moments(self, parameters: Parameters, name: str) -> dict[str, Tensor]:
        """Return a moment of each parameter in its shape; zeros if it has none (yet). Call it on all ranks."""
        out = {}
        for parameter_name, parameter in parameters.items():
            main = self._mains[parameter]
            own = None
            if main.tensor is not None and main.inner is not None:
                value = main.inner.state[main.tensor].get(name) if main.tensor in main.inner.state else None
                own = torch.zeros_like(main.tensor).detach() if value is None else value
            out[parameter_name] = _whole(parameter, main, own)
        return out

    def master_weights(self, parameters: Parameters) -> dict[str, Tensor] | None:
        """Return the float32 master weights of bfloat16 parameters; None if all are float32. See `moments`."""
        if all(parameter.dtype == torch.float32 for parameter in parameters.values()):
            return None
        mains = {name: self._mains[parameter] for name, parameter in parameters.items()}
        return {
            name: _whole(parameters[name], main, None if main.tensor is None else main.tensor.detach())
            for name, main in mains.items()
        }

    def load(
        self,
        parameters: Parameters,
        *,
        step: int,
        moments: Mapping[str, Mapping[str, Tensor]],
        master: Mapping[str, Tensor] | None,
    ) -> None:
        """Continue from saved moments.

        Args:
            parameters: The rank's parameters.
            step: Optimizer steps done so far.
            moments: exp_avg, exp_avg_sq and any average of each parameter, in its shape.
            master: float32 master weights of bfloat16 parameters.
        """
        of_muon = {id(one.tensor) for one in self._matrices}
        for name, parameter in parameters.items():
            main = self._mains[parameter]
            if main.tensor is None or main.inner is None:
                continue
            if master is not None:
                main.tensor.data.copy_(_part(master[name], main))
            state = main.inner.state[main.tensor]
            state.clear()
            if step:
                # One step tensor per parameter, because Adam increments it in place.
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=main.tensor.device)
                kept = [m for m in moments if m != "exp_avg_sq" or id(main.tensor) not in of_muon]
                state.update({m: _part(moments[m][name], main).to(main.tensor.device).clone() for m in kept})
        if self._average_decay:
            self.keep_average(self._average_decay)
        self.set_step(step)

    def start_moments(self) -> None:
        """Create the moments before the first step, which otherwise does."""
        for tensor, state in self._states():
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state.update({name: torch.zeros_like(tensor) for name in MOMENTS})

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield what the optimizer updates on this rank, each with its state."""
        for main in self._mains.values():
            if main.tensor is not None and main.inner is not None:
                yield main.tensor, main.inner.state[main.tensor]

    def set_step(self, step: int) -> None:
        """Set the number of steps done so far, by which Adam corrects its moments."""
        for inner in self.inner():
            for state in inner.state.values():
                if "step" in state:
                    state["step"].fill_(step)
            for group in inner.param_groups:
                if "step" in group:  # fused optimizers of Transformer Engine and apex count by group
                    group["step"] = step

    def tensors(self) -> Iterator[Tensor]:
        """Yield moments and float32 weights that the optimizer keeps in addition to the model's parameters."""
        for main in self._mains.values():
            if main.tensor is not None and main.inner is not None:
                state = main.inner.state.get(main.tensor, {})
                yield from (value for name, value in state.items() if name != "step" and torch.is_tensor(value))
        for parameter, main in self._mains.items():
            if main.tensor is not None and parameter.dtype != torch.float32:
                yield main.tensor


class MegatronAdam(RankAdam):
    """Megatron's mixed-precision AdamW over a rank's model chunks, without weight decay on norms."""

    def __init__(self, chunks: Sequence[Any], options: LearnerOptions, *, is_distributed: bool = False) -> None:
        """Build the optimizer.

        Args:
            chunks: Megatron's DistributedDataParallel chunks.
            options: Learner options with the settings of Adam.
            is_distributed: True to shard state and float32 weights over the data-parallel ranks.
        """
        self._chunks = chunks
        self._device = next(chunks[0].parameters()).device
        is_bf16 = options.dtype == "bfloat16"
        config = OptimizerConfig(
            optimizer="adam",
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
            use_distributed_optimizer=is_distributed,
        )
        with cuda_type_names([parameter for chunk in chunks for parameter in chunk.parameters()]):
            self._optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        for inner in self.inner():
            for group in inner.param_groups:
                if isinstance(inner, torch.optim.AdamW):
                    group["fused"] = True  # one memory pass per parameter, on CPU and GPU
        trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        super().__init__(self._find_mains(trained))

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Return the buffers in which Megatron sums this rank's gradients."""
        return [b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def grad_norm(self) -> float:
        """Return the global norm of the summed gradients, and prepare them for `step`."""
        self._optimizer.prepare_grads()
        return math.sqrt(sum(torch.stack([self._squared_norm(part) for part in self._parts()]).tolist()))

    @torch.no_grad()
    def _squared_norm(self, part: Any) -> Tensor:
        """Return the squared gradient norm of one optimizer over ranks. Megatron's own syncs the GPU per parameter."""
        grads = part.get_main_grads_for_grad_norm()
        return sum_of_squares(grads, group=part.get_grad_stats_parallel_group(), device=self._device)

    def inner(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the torch optimizers that have parameters on this rank."""
        for part in self._parts():
            if part.optimizer is not None:
                yield part.optimizer

    def _apply(self) -> None:
        """Update the weights by the prepared gradients."""
        self._optimizer.step_with_ready_grads()

    def _parts(self) -> Sequence[Any]:
        parts: Sequence[Any] = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return parts

    def _find_mains(self, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, Main]:
        mains: dict[torch.nn.Parameter, Main] = {}
        for part in self._parts():
            if isinstance(part, DistributedOptimizer):
                for parameter, (group, position) in part.model_param_group_index_map.items():
                    tensor = part.optimizer.param_groups[group]["params"][position]
                    start = part._get_model_param_range_map(parameter)["param"].start
                    mains[parameter] = Main(tensor, part.optimizer, start, is_shared=True)
        is_shared = bool(mains) or any(isinstance(part, DistributedOptimizer) for part in self._parts())
        for parameter in parameters:
            if parameter not in mains:
                mains[parameter] = Main(None, None, 0, True) if is_shared else self._plain_main(parameter)
        return mains

    def _plain_main(self, parameter: torch.nn.Parameter) -> Main:
        main = getattr(parameter, "main_param", None)
        tensor = parameter if main is None else main
        for inner in self.inner():
            if any(tensor is p for group in inner.param_groups for p in group["params"]):
                return Main(tensor, inner, 0, is_shared=False)
        raise KeyError("no optimizer has this parameter")


def sum_of_squares(grads: list[Tensor], *, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the squared norm of gradients over the ranks of a group."""
    norms = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]
    squared: Tensor = torch.stack(list(norms)).norm().square()
    dist.all_reduce(squared, group=group)
    return squared


def _whole(parameter: torch.nn.Parameter, main: Main, own: Tensor | None) -> Tensor:
    """Return a tensor in the parameter's shape, assembled from the ranks' slices; rows of it if FSDP divides it."""
    if isinstance(parameter, DTensor) and own is not None:
        mesh, places = parameter.device_mesh, parameter.placements
        return DTensor.from_local(own, mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride())
    if not main.is_shared:
        return own if own is not None else torch.zeros_like(parameter, dtype=torch.float32)
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        whole[main.start : main.start + own.numel()] = own
    is_expert = not getattr(parameter, "allreduce", True)
    dist.all_reduce(whole, group=group_of_copies(of_experts=is_expert))
    return whole.view(parameter.shape)


def _part(whole: Tensor, main: Main) -> Tensor:
    """Return this rank's slice of a tensor in the parameter's shape."""
    if isinstance(whole, DTensor):
        return whole.to_local()
    if not main.is_shared or main.tensor is None:
        return whole
    return whole.reshape(-1)[main.start : main.start + main.tensor.numel()]


class Offloaded:
    """Storages that left the device between phases, with their contents; they return to the same tensors.

    Tensors that view an offloaded storage stay valid objects; only their storage is empty in the meantime.
    """

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Empty the storages of some tensors.

        Args:
            kept: Tensors whose contents are copied to CPU memory, pinned if they are on a GPU.
            dropped: Tensors whose contents are discarded, and become zeros on `restore`.
        """
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._dropped: list[tuple[Tensor, int]] = []
        seen: set[int] = set()
        for tensor in kept:
            whole = _fresh(tensor, seen)
            if whole is not None:
                content = torch.empty(len(whole), dtype=torch.uint8, pin_memory=tensor.device.type != "cpu")
                content.copy_(whole, non_blocking=True)
                whole.untyped_storage().resize_(0)
                self._kept.append((whole, content))
        for tensor in dropped:
            whole = _fresh(tensor, seen)
            if whole is not None:
                self._dropped.append((whole, len(whole)))
                whole.untyped_storage().resize_(0)
        self.num_bytes = sum(len(content) for _, content in self._kept) + sum(size for _, size in self._dropped)

    def restore(self) -> None:
        """Refill the storages."""
        for whole, content in self._kept:
            whole.untyped_storage().resize_(len(content))
            whole.copy_(content, non_blocking=True)
        for whole, size in self._dropped:
            whole.untyped_storage().resize_(size)
            whole.zero_()
        self._kept, self._dropped = [], []


def _fresh(tensor: Tensor, seen: set[int]) -> Tensor | None:
    """Return the bytes of a tensor's storage; None if it is empty or already seen."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage._cdata in seen:
        return None
    seen.add(storage._cdata)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
