"""transformers' model of a policy, with one parameter per tensor of its Hugging Face folder.

Imports transformers, which the extra `rl-distill[megatron]` installs.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import transformers
from torch import Tensor, nn

from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig


class _Expert(nn.Module):
    """A gated feed-forward layer with the names of a Hugging Face folder."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class _Experts(nn.ModuleList):
    """The experts of a layer as separate modules; transformers fuses all of them into two parameters."""

    def __init__(self, mixture: MixtureConfig, hidden_size: int, std: float) -> None:
        super().__init__(_Expert(hidden_size, mixture.ffn_hidden_size) for _ in range(mixture.num_experts))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return outputs [T, hidden] for hidden states [T, hidden], expert indices and weights [T, top_k]."""
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            tokens, places = torch.where(chosen == index)
            weighted = expert(hidden[tokens]) * shares[tokens, places, None]
            out = out.index_add(0, tokens, weighted.to(out.dtype))
        return out


def reference_model(config_json: Mapping[str, Any], config: PolicyConfig, *, dtype: torch.dtype) -> Any:
    """Return transformers' model with random weights and the folder's tensor names.

    A router's bias is a float32 parameter without gradient.

    Args:
        config_json: Content of config.json.
        config: The parsed config.json.
        dtype: dtype of the parameters.
    """
    model_class = getattr(transformers, config.architecture)
    model = model_class(model_class.config_class(**config_json))
    for index, layer in enumerate(model.model.layers):
        if config.mixture is not None and config.is_mixture(index):
            layer.mlp.experts = _Experts(config.mixture, config.hidden_size, config.initializer_range)
    model = model.to(dtype)
    for layer in config.mixture.layers if config.mixture is not None and config.mixture.sigmoid is not None else ():
        gate = model.model.layers[layer].mlp.gate
        del gate.e_score_correction_bias
        gate.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
    return model
