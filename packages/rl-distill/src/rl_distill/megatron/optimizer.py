"""megatron's Adam: clipping, learning rate, and its state by parameter."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from rl_distill.megatron.cpu import cuda_type_names
from rl_distill.options import LearnerOptions
from rl_distill.stepping import clip_scale

Parameters = Mapping[str, torch.nn.Parameter]


class MegatronAdam:
    """megatron's mixed-precision AdamW over a model; no weight decay on norms."""

    def __init__(self, model: Any, options: LearnerOptions) -> None:
        """Make the optimizer.

        Args:
            model: megatron's DistributedDataParallel.
            options: Adam's.
        """
        self._clip_grad = options.clip_grad
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
            use_distributed_optimizer=False,
        )
        with cuda_type_names(list(model.parameters())):
            self._optimizer = get_megatron_optimizer(config, [model])
        for inner in self._inner():
            for group in inner.param_groups:
                # megatron leaves applying wd_mult, which spares norms, to its own scheduler.
                group["weight_decay"] = options.weight_decay * group["wd_mult"]
                if isinstance(inner, torch.optim.AdamW):
                    group["fused"] = True  # one pass over memory for each parameter, on CPU and GPU

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Global norm of the summed gradients; makes them ready for `step`."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, grad_norm: float, *, learning_rate: float) -> None:
        """Clip and update.

        Args:
            grad_norm: What `grad_norm` gave.
            learning_rate: Of this step.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        scale = clip_scale(grad_norm, self._clip_grad)
        if scale < 1.0:  # megatron's own clipping insists on CUDA tensors
            grads = [p.grad for inner in self._inner() for group in inner.param_groups for p in group["params"]]
            torch._foreach_mul_([grad for grad in grads if grad is not None], scale)
        self._optimizer.step_with_ready_grads()

    def moments(self, parameters: Parameters, name: str) -> dict[str, Tensor]:
        """A moment of each parameter; zeros before the first step."""
        out = {}
        for parameter_name, parameter in parameters.items():
            value = self._state_of(_main(parameter)).get(name)
            out[parameter_name] = torch.zeros_like(_main(parameter)).detach() if value is None else value
        return out

    def master_weights(self, parameters: Parameters) -> dict[str, Tensor] | None:
        """float32 weights behind bfloat16 ones; None when the parameters are float32."""
        if all(_main(parameter) is parameter for parameter in parameters.values()):
            return None
        return {name: _main(parameter).detach() for name, parameter in parameters.items()}

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
            parameters: The model's.
            step: Optimizer steps done.
            moments: exp_avg and exp_avg_sq of each parameter.
            master: float32 weights, for bfloat16 parameters.
        """
        for name, parameter in parameters.items():
            main = _main(parameter)
            if master is not None:
                main.data.copy_(master[name])
            state = self._state_of(main)
            state.clear()
            if step:
                # A step tensor for each parameter: Adam counts in place, and a shared one would count them all.
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=main.device)
                state.update({m: moments[m][name].to(main.device).clone() for m in moments})
        for inner in self._inner():
            for group in inner.param_groups:
                if "step" in group:  # fused optimizers of Transformer Engine and apex count by group
                    group["step"] = step

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            yield part.optimizer

    def _state_of(self, main: Tensor) -> dict[str, Any]:
        for inner in self._inner():
            if any(main is p for group in inner.param_groups for p in group["params"]):
                return inner.state[main]  # type: ignore[no-any-return]
        raise KeyError("a parameter is in no optimizer")


def _main(parameter: torch.nn.Parameter) -> Tensor:
    """The float32 tensor that the optimizer updates for a parameter."""
    main = getattr(parameter, "main_param", None)
    return parameter if main is None else main
