"""Every setting that both trainers have; `train --help` prints this file's words.

Values come from, in falling order: the command line (`--trainer.steps=20`), environment variables
(`RL__TRAINER__STEPS=20`), the TOML file, the defaults here. Nothing is ever rewritten by the program.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from rl_core.data import Json
from rl_distill import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.teacher import DistillationOptions
from rl_rollout.engines import VLLMOptions
from rl_rollout.refill import RefillOptions
from rl_rollout.rewards import RewardOptions
from rl_rollout.skip import SkipOptions
from rl_trainer_parts.settings.metrics import HealthSettings, MetricSettings

ReadableBy = Literal["owner", "group", "everyone"]
"""Who may read the files of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Where the run lives.

    Attributes:
        name: Folder of the run, below `directory`.
        directory: Where runs are kept.
        seed: Of prompt order and sampling.
        if_exists: When the folder holds a run already: "refuse", "resume" it, or "archive" it under another
            name and start anew.
        readable_by: Who may read the folder and all that the run's processes write: its "owner", its "group", or
            "everyone"; only its owner may write.
    """

    name: str = "run"
    directory: Path = Path("runs")
    seed: int = 0
    if_exists: Literal["refuse", "resume", "archive"] = "refuse"
    readable_by: ReadableBy = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The model that is trained.

    Attributes:
        path: Hugging Face folder with configuration, tokenizer and safetensors.
        learner: "megatron", or "torch" (the plain reference learner).
    """

    path: Path
    learner: Literal["megatron", "torch"] = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """The problems.

    Attributes:
        train: Parquet, JSONL, or a Hugging Face dataset on disk.
        validation: Evaluated every `trainer.validate_every` steps; use it to choose settings.
        test: Evaluated only before the first and after the last step; never used to choose anything.
        max_tokens: Longest prompt, template included.
        overlong: What to do with a longer one: "error" or "drop".
        plain_prompts: Tokenize a prompt that is text as it stands ("raw"), or as a user's message ("chat").
        requires_ground_truth: Refuse rows with neither `reward_model.ground_truth` nor `answer`.
        template_options: Variables of the chat template, such as {enable_thinking = false}.
        validation_limit: Use only the first so many validation problems; none uses all.
        validation_samples: Responses to each validation and test problem; of several, pass@k, the best, the worst and
            the majority of n are told.
        validation_temperature: Of these responses; 0 takes the likeliest token each time.
    """

    train: Path
    validation: Path | None = None
    test: Path | None = None
    max_tokens: int = 1024
    overlong: Literal["error", "drop"] = "error"
    plain_prompts: Literal["raw", "chat"] = "raw"
    requires_ground_truth: bool = True
    template_options: dict[str, str | bool | int | float] = field(default_factory=dict)
    validation_limit: int | None = None
    validation_samples: int = 1
    validation_temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How responses are made.

    Attributes:
        engine: "vllm", "transformers", or the name of one installed by another package.
        placement: "inline" (in the learner's process, where a debugger works), "process" (processes of this machine),
            or "ray" (actors of Ray, on one machine or many); see `replicas`.
        loop: Agent loop by name: "single_turn", "tools", "environment", "agent", "verifiers" (shown in
            examples/verifiers), or one installed by another package.
        loop_options: Its options, a table.
        audit_share: Share of the sessions whose tokens are proved to be those that the engine sampled.
        rescored_share: Share of the sessions that the engine scores again, while it serves what sampled them.
        sleep: Let the engine free its memory while the learner trains, where its platform can.
        sleep_keeps_weights: Keep a sleeping engine's weights on the host (level 1). false drops them (level 2): use it
            to save both copies when each update brings all weights, so not with lora.serving = "adapter".
        prompts_per_step: Prompts of a step.
        group_size: Sessions of each prompt.
        max_response_tokens: Longest response.
        temperature: Of training samples.
        top_p: Nucleus of training samples; 1 keeps every token.
        top_k: Keep the k likeliest tokens; none keeps all.
        deadline_s: Longest wait for one step's rollouts.
        start_deadline_s: Longest wait for the engine to start.
    """

    engine: str = "vllm"
    placement: Literal["inline", "process", "ray"] = "inline"
    loop: str = "single_turn"
    loop_options: dict[str, Json] = field(default_factory=dict)
    audit_share: float = 0.1
    rescored_share: float = 0.02
    sleep: bool = False
    sleep_keeps_weights: bool = True
    prompts_per_step: int = 64
    group_size: int = 8
    max_response_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    deadline_s: float = 3600.0
    start_deadline_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The engine's replicas, where it has processes of its own; requests are spread over them.

    Attributes:
        count: How many.
        cpus: CPUs to set aside for each; 0 shares what there is.
        gpus: GPUs to set aside for each; none takes what one needs, where this machine has GPUs and there are several
            replicas.
        restarts: How often one that died is started again, with the present weights; its requests go to others.
    """

    count: int = 1
    cpus: float = 0.0
    gpus: float | None = None
    restarts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How the learner's weights reach engines in processes of their own.

    Attributes:
        transport: "file" (in shared memory of this machine; an engine elsewhere gets its bytes), "ipc" (in memory of
            the GPU that one engine in a process of its own shares with a learner of one rank; a copy of the weights
            stays there until the next update, or until it is taken where replicas.restarts is 0), or buckets over the
            network by "tcp" (CPUs; "gloo" is its earlier name) or "nccl" (GPUs; engine and learner need different
            ones); or "direct", for a model that is too large for one process: each rank of the learner sends what it
            holds, by nccl from GPUs and by tcp from CPUs. An engine that is started again while weights change waits
            for the next ones then.
        host: Address of this machine, as the engines reach it, for all but file. Nothing listens on another one.
        bucket_mib: Size of a bucket; with direct, of those of all ranks together.
        deadline_s: Longest wait for a bucket.
    """

    transport: Literal["file", "ipc", "tcp", "gloo", "nccl", "direct"] = "file"
    host: str = "127.0.0.1"
    bucket_mib: int = 256
    deadline_s: float = 60.0


OptionValue = bool | int | float | str
"""What an option of an advantage or a policy loss can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """What is optimised.

    Attributes:
        advantage: "grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus",
            "reinforce_plus_plus_baseline", "gae" (needs a critic), or the name of one installed by another package.
        advantage_options: Its options, such as {gamma = 0.99, lam = 0.95} of gae, or {weights = {accuracy = 1.0}} of
            gdpo, which names the components of the reward.
        session_rule: What a session is worth that gave several trajectories: "last" (all get the last one's
            advantage), "last_only" (the last alone gets it), "mean", or "each" (every trajectory for itself).
        policy_loss: "ppo_clip", "gspo", "geo_mean" (GMPO), "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "clip_cov",
            "kl_cov", or the name of one installed by another package.
        policy_loss_options: Its further options, such as {dual_clip = inf} of ppo_clip, which turns the dual clip off.
        clip_low: Clip range below; none takes the policy loss's own (ppo_clip: ratios below 1 - 0.2).
        clip_high: Clip range above; none takes the policy loss's own (ppo_clip: ratios above 1 + 0.2).
        aggregation: "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm" or "seq-mean-token-mean",
            over the whole batch.
        kl_in: Where the KL to the frozen initial policy counts: in the "loss", or as a penalty in the "reward".
        kl_coefficient: Weight of that KL; 0 loads no reference.
        kl_estimator: "k1", "k2", "k3" or "abs"; in the loss also "k1+", "k3+" or "abs+", their values with k2's
            gradient.
        kl_target: KL in nats a token that the coefficient is adapted to hold; none leaves it fixed.
        kl_horizon: Trajectories over which an error of 20 % changes an adapted coefficient by 20 %.
        entropy_coefficient: Weight of the entropy bonus.
        old_logprobs: PPO's denominator: "rollout" takes the engine's logprobs, "recompute" the learner's own
            before the update.
    """

    advantage: str = "grpo"
    advantage_options: dict[str, OptionValue | dict[str, float]] = field(default_factory=dict)
    session_rule: str = "last"
    policy_loss: str = "ppo_clip"
    policy_loss_options: dict[str, OptionValue] = field(default_factory=dict)
    clip_low: float | None = None
    clip_high: float | None = None
    aggregation: str = "token-mean"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    entropy_coefficient: float = 0.0
    old_logprobs: Literal["rollout", "recompute"] = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """What is done about the engine's probabilities, which are slightly other than the learner's.

    Attributes:
        weights: Importance weights of learner over engine by "token" or by "sequence", or "none"; needs
            algorithm.old_logprobs = "recompute".
        cap: Largest weight.
        floor: Smallest weight: what is outside floor and cap then weighs 0 (IcePop); none truncates at the cap alone.
        reject: Bound of each criterion by which tokens or trajectories are left out of training: token_k1, token_k2,
            token_k3, or one of seq_sum, seq_mean and seq_max with the same endings, such as {seq_mean_k3 = 0.01} or
            {token_k1 = [0.5, 2.0]}; needs algorithm.old_logprobs = "recompute".
    """

    weights: Literal["none", "token", "sequence"] = "none"
    cap: float = 2.0
    floor: float | None = None
    reject: dict[str, float | tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The critic of `algorithm.advantage = "gae"`; what is not here is as in `[learner]`.

    Attributes:
        path: Hugging Face folder to begin with; none takes the policy's, under a value head of zeros.
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up from 0.
        clip_grad: Largest global gradient norm; 0 turns clipping off.
        value_clip: Largest distance of a value from the one before the step's updates that is learnt from; inf is off.
        head_start_steps: Steps in which the critic alone trains, before the policy does.
    """

    path: Path | None = None
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    clip_grad: float = 1.0
    value_clip: float = 0.2
    head_start_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Where the learner's ranks run.

    Attributes:
        kind: "inline" (one rank, in the trainer's process, where a debugger works), "process" (each rank in a process
            of this machine), or "ray" (each in an actor of Ray, on one machine or many).
        cpus_per_rank: CPUs to set aside for each rank; 0 shares what there is.
        gpus_per_rank: GPUs to set aside for each rank; 0 trains on CPUs, none takes one where this machine has GPUs.
        ray_address: "host:port" of a Ray cluster to join, for ranks and engines, whose token is in RAY_AUTH_TOKEN; none
            starts one here.
        start_deadline_s: Longest wait for the ranks to start.
        call_deadline_s: Longest wait for an answer of theirs, such as that of an optimizer step.
    """

    kind: Literal["inline", "process", "ray"] = "inline"
    cpus_per_rank: float = 0.0
    gpus_per_rank: float | None = None
    ray_address: str | None = None
    start_deadline_s: float = 600.0
    call_deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The loop.

    Attributes:
        steps: Steps to train; each makes one batch of rollouts.
        minibatches: Optimizer updates that a step's groups are divided into.
        epochs: How often a step's groups are gone through.
        max_skipped_updates: Updates in a row whose loss or gradients may be not finite; they are skipped. One more ends
            the run, with the rows saved.
        offload: Free the learner's memory while the engine generates.
        validate_every: Steps between validations; 0 validates only at the end.
        validate_first: Also validate before the first step.
        checkpoint_every: Steps between checkpoints; 0 writes only the last.
        keep_checkpoints: How many of the newest to keep.
        background_checkpoints: Write them while training goes on, from a copy of the learner's state in memory.
        canary_prompts: Prompts whose logprobs prove each weight update.
        proof_tolerance: Largest canary difference in nats; none chooses by the engine's dtype.
    """

    steps: int = 100
    minibatches: int = 1
    epochs: int = 1
    max_skipped_updates: int = 3
    offload: bool = False
    validate_every: int = 10
    validate_first: bool = True
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    background_checkpoints: bool = True
    canary_prompts: int = 4
    proof_tolerance: float | None = None


UPDATE_KL = ("actor/ppo_kl", "rollout_corr/kl")
"""Metrics of how far the policy is from the one that sampled."""


class Settings(BaseSettings):
    """All settings of a run, in the order of use; a trainer that has more derives from it.

    Attributes:
        also_changeable_on_resume: Of those more, the ones that may differ when a run is resumed.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    also_changeable_on_resume: ClassVar[tuple[str, ...]] = ()

    run: RunSettings = Field(default_factory=RunSettings)
    policy: PolicySettings
    prompts: PromptSettings
    reward: RewardOptions = Field(default_factory=RewardOptions)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    learner: LearnerOptions = Field(default_factory=LearnerOptions)
    lora: LoraOptions = Field(default_factory=LoraOptions)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    engine: VLLMOptions = Field(default_factory=VLLMOptions)
    metrics: MetricSettings = Field(default_factory=MetricSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    critic: CriticSettings = Field(default_factory=CriticSettings)
    correction: CorrectionSettings = Field(default_factory=CorrectionSettings)
    distillation: DistillationOptions = Field(default_factory=DistillationOptions)
    refill: RefillOptions = Field(default_factory=RefillOptions)
    skip: SkipOptions = Field(default_factory=SkipOptions)
    replicas: ReplicaSettings = Field(default_factory=ReplicaSettings)
    parallel: ParallelOptions = Field(default_factory=ParallelOptions)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    weights: WeightSettings = Field(default_factory=WeightSettings)

    @property
    def placements(self) -> dict[str, str]:
        """Where each part of the run lives, by the setting that says so."""
        return {"cluster.kind": self.cluster.kind, "rollout.placement": self.rollout.placement}

    @property
    def zero_metrics(self) -> tuple[str, ...]:
        """Metrics that are 0 by design: a step's only update begins at the very policy that sampled."""
        return ("training/staleness/mean", *(UPDATE_KL if self.has_one_update else ()))

    @property
    def has_one_update(self) -> bool:
        """True where each step updates the policy once."""
        return self.trainer.minibatches == self.trainer.epochs == 1

    @property
    def run_folder(self) -> Path:
        """Where everything of the run lies."""
        return self.run.directory / self.run.name
