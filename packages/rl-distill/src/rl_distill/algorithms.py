"""Algorithms by name, each with the values of its paper; imports without torch.

An algorithm is a choice of parts: an advantage, a policy loss, an aggregation, a KL and a filter. Other packages add
theirs with the entry point group `rl_distill.algorithms`, whose entries are `Algorithm`s.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

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
    filter: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


NO_DUAL_CLIP = {"dual_clip": math.inf}
OF_RESPONSES, SUMMED = "seq-mean-token-mean", "seq-mean-token-sum"

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "ppo": Algorithm(
            title="PPO",
            source="arXiv:2203.02155",
            advantage="gae",
            clip_low=0.2,
            clip_high=0.2,
            kl_in="reward",
            kl_coefficient=0.02,
            kl_estimator="k1",
            options={"gamma": 1.0, "lam": 0.95, **NO_DUAL_CLIP},
        ),
        "grpo": Algorithm(
            title="GRPO",
            source="arXiv:2402.03300",
            advantage="grpo",
            clip_low=0.2,
            clip_high=0.2,
            aggregation=OF_RESPONSES,
            kl_coefficient=0.04,
            options=NO_DUAL_CLIP,
        ),
        "dr_grpo": Algorithm(
            title="Dr. GRPO",
            source="arXiv:2503.20783",
            advantage="dr_grpo",
            clip_low=0.2,
            clip_high=0.2,
            aggregation="seq-mean-token-sum-norm",
            options=NO_DUAL_CLIP,
        ),
        "dapo": Algorithm(
            title="DAPO",
            source="arXiv:2503.14476",
            advantage="grpo",
            clip_low=0.2,
            clip_high=0.28,
            filter="reward_spread",
            options=NO_DUAL_CLIP,
        ),
        "gspo": Algorithm(
            title="GSPO",
            source="arXiv:2507.18071",
            advantage="grpo",
            policy_loss="gspo",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation=OF_RESPONSES,
        ),
        "gmpo": Algorithm(
            title="GMPO",
            source="arXiv:2507.20673",
            advantage="grpo",
            policy_loss="geo_mean",
            clip_low=0.4,
            clip_high=0.4,
            aggregation=OF_RESPONSES,
        ),
        "sapo": Algorithm(
            title="SAPO",
            source="arXiv:2511.20347",
            advantage="grpo",
            policy_loss="sapo",
            aggregation=OF_RESPONSES,
            options={"tau_positive": 1.0, "tau_negative": 1.05},
        ),
        "cispo": Algorithm(
            title="CISPO",
            source="arXiv:2506.13585",
            advantage="grpo",
            policy_loss="cispo",
            clip_low=1.0,
            filter="reward_spread",
        ),
        "rloo": Algorithm(
            title="RLOO",
            source="arXiv:2402.14740",
            advantage="rloo",
            policy_loss="gpg",
            aggregation=SUMMED,
            kl_in="reward",
            kl_coefficient=0.03,
            kl_estimator="k1",
        ),
        "remax": Algorithm(
            title="ReMax",
            source="arXiv:2310.10505",
            advantage="remax",
            policy_loss="gpg",
            aggregation=SUMMED,
            kl_in="reward",
            kl_coefficient=0.1,
            kl_estimator="k1",
        ),
        "reinforce_plus_plus": Algorithm(
            title="REINFORCE++",
            source="arXiv:2501.03262",
            advantage="reinforce_plus_plus",
            clip_low=0.2,
            clip_high=0.2,
            kl_in="reward",
            kl_coefficient=0.01,
            kl_estimator="k1",
            options={"gamma": 1.0, **NO_DUAL_CLIP},
        ),
        "reinforce_plus_plus_baseline": Algorithm(
            title="REINFORCE++ with a baseline",
            source="arXiv:2501.03262",
            advantage="reinforce_plus_plus_baseline",
            clip_low=0.2,
            clip_high=0.2,
            kl_coefficient=0.01,
            kl_estimator="k2",
            options=NO_DUAL_CLIP,
        ),
        "opo": Algorithm(title="OPO", source="arXiv:2505.23585", advantage="opo", policy_loss="gpg"),
        "gpg": Algorithm(title="GPG", source="arXiv:2504.02546", advantage="gpg", policy_loss="gpg"),
        "grpo_passk": Algorithm(
            title="Pass@k training", source="arXiv:2503.19595", advantage="grpo_passk", options=NO_DUAL_CLIP
        ),
        "gdpo": Algorithm(title="GDPO", source="arXiv:2601.05242", advantage="gdpo", options=NO_DUAL_CLIP),
        "clip_cov": Algorithm(
            title="Clip-Cov", source="arXiv:2505.22617", advantage="grpo", policy_loss="clip_cov", clip_high=0.2
        ),
        "kl_cov": Algorithm(title="KL-Cov", source="arXiv:2505.22617", advantage="grpo", policy_loss="kl_cov"),
        "dppo": Algorithm(title="DPPO", source="arXiv:2602.04879", advantage="dr_grpo", policy_loss="dppo_tv"),
        "dro": Algorithm(
            title="DRO", source="arXiv:2405.19107", advantage="dr_grpo", policy_loss="dro", aggregation=SUMMED
        ),
    },
    group="rl_distill.algorithms",
)
