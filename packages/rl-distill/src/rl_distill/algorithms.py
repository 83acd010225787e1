"""Algorithms by name, each with the values of its paper; imports without torch.

An algorithm is a choice of parts: an advantage, a policy loss, an aggregation, a KL and a filter. The built-in ones are
in algorithms.toml. Other packages add
theirs with the entry point group `rl_distill.algorithms`, whose entries are `Algorithm`s.
"""

from collections.abc import Mapping
from dataclasses import field
from importlib.resources import files
from typing import Any, Literal

from rl_core.files import parse_toml
from rl_core.record_fields import NonNegativeFloat, settings_record
from rl_core.registry import Registry


@settings_record
class Algorithm:
    """The parts of an algorithm, with the values of its paper.

    Attributes:
        title: Its name as people write it.
        source: The paper, such as "arXiv:2402.03300".
        advantage: Name in `rl_distill.objectives.ADVANTAGES`.
        policy_loss: Name in `rl_distill.objectives.POLICY_LOSSES`.
        clip_low: Lower clip range; None is the policy loss's own.
        clip_high: Upper clip range; None is the policy loss's own.
        aggregation: Name in `rl_distill.objectives.AGGREGATIONS`.
        kl_in: Where the KL to the initial policy is applied: in the "loss" or in the "reward".
        kl_coefficient: Weight of that KL; 0 is none.
        kl_estimator: Name in `rl_distill.objectives.KL_ESTIMATORS`.
        old_logprobs: Denominator of ratios: the engine's logprobs ("rollout"), or the learner's ("recompute").
        filter: Name of a filter of groups, such as "reward_spread"; empty keeps all.
        options: Options of the advantage and of the policy loss that differ from their own defaults.
    """

    title: str
    source: str
    advantage: str
    policy_loss: str = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    aggregation: str = "token-mean"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: str = "k3"
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    filter: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def _of_papers() -> dict[str, Algorithm]:
    text = files("rl_distill").joinpath("algorithms.toml").read_text("utf-8")
    return {name: Algorithm(**values) for name, values in parse_toml(text, where="algorithms.toml").items()}


ALGORITHMS: Registry[Algorithm] = Registry("algorithm", _of_papers(), group="rl_distill.algorithms")
