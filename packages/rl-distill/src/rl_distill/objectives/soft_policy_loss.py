"""Policy losses that fade out a token's gradient instead of clipping it: SAPO.

Source: SAPO, Gao et al. 2025, arXiv:2511.20347, equations 3 to 6.
"""

import torch

from rl_core.record_fields import PositiveFloat, converts_arguments
from rl_distill.objectives.policy_loss import PolicyTokens, TokenLosses

Steepness = PositiveFloat
"""Steepness of a sigmoid; a higher value fades earlier."""


@converts_arguments
def sapo(tokens: PolicyTokens, *, tau_positive: Steepness = 1.0, tau_negative: Steepness = 1.05) -> TokenLosses:
    """Soft adaptive policy optimization: a sigmoid of the ratio instead of the clip.

    The paper weights all trajectories equally: aggregate with seq-mean-token-mean.

    Args:
        tokens: Packed tokens.
        tau_positive: Steepness at positive advantages; a higher value fades earlier.
        tau_negative: Steepness at all other advantages.

    Returns:
        Losses -advantage * 4 / tau * sigmoid(tau * (ratio - 1)), whose gradient at ratio 1 is that of -advantage *
        ratio, and `actor/ppo_kl`.

    Raises:
        SettingsError: A steepness is not above 0.
    """
    log_ratio = tokens.log_ratio()
    steepness = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(log_ratio.dtype)
    gate = torch.sigmoid(steepness * (log_ratio.exp() - 1.0)) * (4.0 / steepness)
    return TokenLosses(losses=-tokens.advantages * gate, diagnostics={"actor/ppo_kl": -log_ratio.detach()})
