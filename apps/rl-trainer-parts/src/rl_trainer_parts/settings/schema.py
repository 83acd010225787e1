"""Every setting that both trainers have; `train --help` prints these docstrings.

Values come from, in order of precedence: the command line (`--trainer.steps=20`), environment variables
(`RL__TRAINER__STEPS=20`), the TOML file, the defaults here. The program never changes a setting.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field

from rl_core.data import Json
from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat
from rl_distill import LearnerOptions, LoraOptions, ModelBackend, ParallelOptions
from rl_distill.teacher import DistillationOptions
from rl_metrics.health import Severity
from rl_metrics.targets import TargetOptions
from rl_metrics.trackers import ConsoleKind
from rl_rollout.engines import VLLMOptions
from rl_rollout.refill import RefillOptions
from rl_rollout.rewards import RewardOptions
from rl_rollout.skip import SkipOptions

Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
"""At most the largest seed of every library."""

Count = Annotated[int, Ge(1), Le(10**9)]
"""At most more steps or responses than any run has."""

ReadableBy = Literal["owner", "group", "everyone"]
"""Who may read the files of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Name, folder and seed of the run.

    Attributes:
        name: Name of the run, and of its folder below `directory`.
        directory: Parent folder of all runs.
        seed: Seed of the prompt order and of sampling.
        if_exists: What to do when the run's folder already holds a run: "refuse" to start, "resume" it, or "archive" it
            under another name and start a new run.
        readable_by: Who may read the run's folder and every file its processes write: its "owner", its "group" or
            "everyone". Only the owner may write.
    """

    name: str = "run"
    directory: Path = Path("runs")
    seed: Seed = 0
    if_exists: Literal["refuse", "resume", "archive"] = "refuse"
    readable_by: ReadableBy = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The model to train.

    Attributes:
        path: Hugging Face folder with configuration, tokenizer and safetensors weights; or a run's folder, which stands
            for the policy of its newest checkpoint.
        backend: What computes it in training: "megatron", layers that ranks can divide, for Qwen2, Qwen3, Llama and
            GLM-4.5; "transformers", the model's own class, for every other architecture; "auto" the first that can.
    """

    path: Path
    backend: ModelBackend = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """The prompts to train and evaluate on.

    Attributes:
        train: Training prompts, or the demonstrations of `sft`: Parquet, JSONL, or a Hugging Face dataset on disk.
        validation: Validation prompts, evaluated every `trainer.validate_every` steps. Use them to choose settings.
        test: Test prompts, evaluated only before the first and after the last step. They never influence the run.
        max_tokens: Maximum prompt length in tokens, including the chat template; in `sft`, of a whole demonstration.
        overlong: What to do with a prompt above `max_tokens`: "error" or "drop".
        plain_prompts: How to tokenize a prompt that is plain text: "raw", exactly as it stands, or "chat", as a user
            message.
        requires_ground_truth: Refuse rows that have neither `reward_model.ground_truth` nor `answer`.
        max_images: Maximum number of images in a prompt.
        image_folders: Folders whose images rows may name, besides the folder of their file.
        image_urls: Beginnings of URLs whose images rows may name, such as "https://images.example.org/". They are
            fetched before the run and kept in the user's cache; other URLs are refused.
        template_options: Variables passed to the chat template, such as {enable_thinking = false}.
        date: Day that a chat template prints as today's, such as "2026-01-31". None is the day on which the run starts,
            which it keeps when it is resumed.
        validation_limit: Use only the first N validation prompts; none uses all.
        validation_samples: Responses per validation and test prompt. With several, pass@k, best, worst and
            majority-vote scores are reported.
        validation_temperature: Sampling temperature for validation and test responses; 0 is greedy.
    """

    train: Path
    validation: Path | None = None
    test: Path | None = None
    max_tokens: PositiveInt = 1024
    overlong: Literal["error", "drop"] = "error"
    plain_prompts: Literal["raw", "chat"] = "raw"
    requires_ground_truth: bool = True
    max_images: Annotated[int, Ge(1), Le(64)] = 16
    image_folders: tuple[Path, ...] = ()
    image_urls: tuple[str, ...] = ()
    template_options: dict[str, str | bool | int | float] = field(default_factory=dict)
    date: str | None = None
    validation_limit: PositiveInt | None = None
    validation_samples: PositiveInt = 1
    validation_temperature: NonNegativeFloat = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How responses are generated.

    Attributes:
        engine: "auto" (vLLM where it is installed and supports the policy's model, else transformers), "vllm",
            "transformers", or the name of an engine that another package installs.
        placement: Where the engine runs: "inline" (in the trainer's process, easy to debug), "process" (in processes on
            this machine) or "ray" (in Ray actors, on one or more machines). See `replicas`.
        loop: Agent loop: "single_turn", "tools", "environment", "agent", "verifiers" (see examples/verifiers), or the
            name of a loop that another package installs.
        loop_options: Options of the agent loop.
        audit_share: Share of sessions that are audited: their tokens must be exactly the tokens the engine sampled.
        rescored_share: Share of sessions that the engine scores a second time, with the same weights, to check its own
            logprobs.
        offload_engine: Free the engine's memory while the learner trains, on platforms that support it.
        offload_keeps_weights: Keep a sleeping engine's weights in host memory (vLLM's sleep level 1). false drops them
            (level 2), which saves host memory; it needs updates that carry all weights, so it does not work with
            lora.serving = "adapter".
        prompts_per_step: Prompts per training step.
        group_size: Sessions per prompt (GRPO's group size).
        max_response_tokens: Maximum response length in tokens.
        mask_truncated: Do not train on sessions that a limit ended before they finished: of response tokens, of turns
            or of the context (DAPO's overlong filtering). Their rewards still count in the advantages of their group.
        temperature: Sampling temperature for training.
        top_p: Nucleus sampling threshold for training; 1 keeps every token. It needs top_k. The learner scores each
            token among the tokens that both kept.
        top_k: Sample from the k most likely tokens, at least 2; none keeps all.
        deadline_s: Maximum time for one step's rollouts.
        start_deadline_s: Maximum time for the engine to start.
    """

    engine: str = "auto"
    placement: Literal["inline", "process", "ray"] = "inline"
    loop: str = "single_turn"
    loop_options: dict[str, Json] = field(default_factory=dict)
    audit_share: UnitFloat = 0.1
    rescored_share: UnitFloat = 0.02
    offload_engine: bool = False
    offload_keeps_weights: bool = True
    prompts_per_step: Count = 64
    group_size: Count = 8
    max_response_tokens: PositiveInt = 1024
    mask_truncated: bool = False
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: int | None = None
    deadline_s: PositiveFloat = 3600.0
    start_deadline_s: PositiveFloat = 900.0

    @property
    def nucleus_width(self) -> int | None:
        """Most tokens that top_k and top_p may keep; None if they keep all. Equally likely tokens may exceed top_k."""
        return None if self.top_k is None else 2 * self.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Replicas of an engine that runs in its own processes; requests are balanced across them.

    Attributes:
        count: Number of replicas.
        cpus: CPUs reserved for each replica; 0 shares all CPUs.
        gpus: GPUs reserved for each replica. With none, a replica reserves as many as it needs if this machine has GPUs
            and there are several replicas.
        restarts: How often a dead replica is restarted with the current weights. Other replicas take over its requests.
    """

    count: PositiveInt = 1
    cpus: NonNegativeFloat = 0.0
    gpus: NonNegativeFloat | None = None
    restarts: NonNegativeInt = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How the learner's weights reach engines in other processes.

    Attributes:
        transport: "file": shared memory on this machine, and the same bytes over the network for a remote engine.
            "ipc": the memory of the GPU that one engine process shares with a single-rank learner; the copy stays there
            until the next update, or only until the engine has loaded it if replicas.restarts is 0. "tcp" (CPUs)
            and "nccl" (GPUs; engine and learner on different GPUs): broadcast in buckets over the
            network. "direct": every learner rank sends its own shards, over NCCL from GPUs and over TCP from CPUs; use
            it when one process cannot hold the model. With direct, an engine that restarts during an update waits for
            the next one.
        host: Address of this machine that the engines can reach; every transport but "file" listens on it, and on no
            other.
        bucket_mib: Size of a bucket in MiB. With direct, the size of all ranks' buckets together.
        deadline_s: Maximum wait for a bucket.
    """

    transport: Literal["file", "ipc", "tcp", "nccl", "direct"] = "file"
    host: str = "127.0.0.1"
    bucket_mib: PositiveInt = 256
    deadline_s: PositiveFloat = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """The algorithm. Options of the chosen advantage and policy loss, such as algorithm.gamma, are settings too.

    Attributes:
        name: An algorithm, which sets what follows, and dynamic_sampling.filter, to the values of its paper: "ppo",
            "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "rloo", "remax", "reinforce_plus_plus",
            "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "gdpo", "lite_ppo", "maxrl", "otb", "clip_cov",
            "kl_cov", "dppo", "dro", or one that another package installs. Values of your own take precedence. none uses
            the defaults below, GRPO as verl and TRL run it.
        advantage: "grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "lite_ppo", "maxrl",
            "optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae" (needs a critic),
            "remax" (runs a greedy session per prompt too), or the name of an advantage that another package installs.
        session_rule: How a session with several trajectories is credited: "last" (all get the advantage of the last
            one), "last_only" (only the last one trains), "mean", or "each" (every trajectory has its own advantage).
        policy_loss: "ppo_clip", "gspo", "geo_mean" (GMPO), "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "dro",
            "clip_cov", "kl_cov", or the name of a loss that another package installs.
        clip_low: Lower clip range; none uses the loss's default (ppo_clip: 0.2, so ratios below 1 - 0.2 are clipped).
        clip_high: Upper clip range; none uses the loss's default (ppo_clip: 0.2, so ratios above 1 + 0.2 are clipped).
        aggregation: How token losses are averaged over the whole batch: "token-mean", "seq-mean-token-sum",
            "seq-mean-token-sum-norm" or "seq-mean-token-mean"; or summed: "token-sum".
        kl_in: Where the KL to the frozen initial policy is applied: in the "loss", or as a penalty in the "reward".
        kl_coefficient: Weight of that KL; 0 loads no reference model.
        kl_estimator: "k1", "k2", "k3" or "abs". In the loss also "k1+", "k3+" and "abs+", which combine their value
            with k2's gradient.
        kl_target: Target KL in nats per token for an adaptive coefficient; none keeps the coefficient fixed.
        kl_horizon: Number of trajectories over which a 20 % error in the KL changes an adaptive coefficient by 20 %.
        entropy_coefficient: Weight of the entropy bonus.
        old_logprobs: Denominator of PPO's ratio: "rollout" uses the engine's logprobs, "recompute" the learner's own,
            computed before the update.
    """

    name: str | None = None
    advantage: str = "grpo"
    session_rule: str = "last"
    policy_loss: str = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    aggregation: str = "token-mean"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: str = "k3"
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveInt = 10_000
    entropy_coefficient: float = 0.0
    old_logprobs: Literal["rollout", "recompute"] = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Corrects for the small differences between the engine's and the learner's probabilities.

    Attributes:
        weights: Importance weights (learner over engine) per "token" or per "sequence", or "none". Needs
            algorithm.old_logprobs = "recompute".
        cap: Maximum importance weight.
        floor: Minimum importance weight: anything outside [floor, cap] gets weight 0 (IcePop). With none, weights are
            only truncated at the cap.
        reject: Bounds beyond which tokens or trajectories do not train, by criterion: token_k1, token_k2, token_k3, or
            seq_sum, seq_mean and seq_max with the same endings; for example {seq_mean_k3 = 0.01} or {token_k1 = [0.5,
            2.0]}. Needs algorithm.old_logprobs = "recompute".
    """

    weights: Literal["none", "token", "sequence"] = "none"
    cap: Annotated[float, Gt(0)] = 2.0
    floor: float | None = None
    reject: dict[str, float | tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The critic for `algorithm.advantage = "gae"`. Settings not listed here come from `[optimizer]`.

    Attributes:
        path: Hugging Face folder with the critic's initial weights; none uses the policy's, with a value head of zeros.
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up from 0.
        clip_grad: Maximum global gradient norm; 0 disables clipping.
        value_clip: PPO's value clip: the maximum distance from the value before the update; inf disables it.
        head_start_steps: Steps at the start that train only the critic.
    """

    path: Path | None = None
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: NonNegativeInt = 0
    clip_grad: NonNegativeFloat = 1.0
    value_clip: Annotated[float, Gt(0)] = 0.2
    head_start_steps: NonNegativeInt = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Where the learner's ranks run.

    Attributes:
        placement: "inline" (one rank, in the trainer's process, easy to debug), "process" (each rank in a process on
            this machine) or "ray" (each rank in a Ray actor, on one or more machines).
        cpus_per_rank: CPUs reserved for each rank; 0 shares all CPUs.
        gpus_per_rank: GPUs reserved for each rank. 0 trains on CPUs; none reserves one if this machine has GPUs.
        ray_address: "host:port" of the Ray cluster to join, for ranks and engines; its token is read from
            RAY_AUTH_TOKEN. none starts a local cluster.
        start_deadline_s: Maximum time for the ranks to start.
        call_deadline_s: Maximum time for one call to the ranks, such as an optimizer step.
    """

    placement: Literal["inline", "process", "ray"] = "inline"
    cpus_per_rank: NonNegativeFloat = 0.0
    gpus_per_rank: NonNegativeFloat | None = None
    ray_address: str | None = None
    start_deadline_s: PositiveFloat = 600.0
    call_deadline_s: PositiveFloat = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The training loop.

    Attributes:
        steps: Training steps; each trains on one batch of rollouts.
        minibatches: Optimizer updates per epoch; the step's groups are split evenly between them.
        epochs: Passes over each step's groups.
        max_skipped_updates: How many consecutive updates may be skipped because the loss or a gradient is not finite.
            One more stops the run and saves the rows.
        offload_learner: Free the learner's memory while the engine generates.
        validate_every: Steps between validations; 0 validates only at the end.
        validate_first: Also validate before the first step.
        checkpoint_every: Steps between checkpoints; 0 writes only the last one.
        keep_checkpoints: Number of most recent checkpoints to keep.
        keep_best: Also save and keep the checkpoint of the best validation, by the metric of `target`. `--best` of
            `export`, `validate` and `train` uses it.
        target: What validation should reach, such as {value = 0.55, stop = true}.
        stop_when_no_better: Stop the run after this many validations without a new best; none never stops for this.
        background_checkpoints: Write checkpoints in the background, from an in-memory copy of the learner's state,
            while training continues.
        canary_prompts: Number of prompts whose logprobs are compared to prove each weight update.
        proof_tolerance: Maximum difference in nats between engine and learner on those prompts; none uses the default
            for the engine's dtype.
    """

    steps: Count = 100
    minibatches: PositiveInt = 1
    epochs: Count = 1
    max_skipped_updates: NonNegativeInt = 3
    offload_learner: bool = False
    validate_every: NonNegativeInt = 10
    validate_first: bool = True
    checkpoint_every: NonNegativeInt = 20
    keep_checkpoints: PositiveInt = 2
    keep_best: bool = True
    target: TargetOptions = field(default_factory=TargetOptions)
    stop_when_no_better: PositiveInt | None = None
    background_checkpoints: bool = True
    canary_prompts: PositiveInt = 4
    proof_tolerance: PositiveFloat | None = None


LEVELS: tuple[Severity, ...] = ("critical", "warning")
"""Severities that `health.pause_on` accepts beside names of rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSettings:
    """What the run records and displays.

    Attributes:
        console: "auto" (a live display in a terminal, plain lines elsewhere), "bar" (the live display), "lines",
            "quiet" (only findings and the result), "json" (one JSON object per line) or "off".
        strict: Fail, instead of warning, on a metric without a definition.
        log_val_generations: Validation responses to record and send to trackers at each validation, one per prompt. The
            console shows a few from the first and the last validation.
        log_rollouts: Trajectories to record token by token in rollouts.jsonl at each step: the worst, the slowest and
            the best of the worst one's group, then a random sample in pairs from the same group. 0 records none.
        log_rollout_tokens: Maximum number of response tokens recorded per step; at least one trajectory is always
            recorded.
        probes: Number of validation tokens to probe at each validation, chosen where the initial policy is least
            certain. The policy's preferred alternatives are written to probes.jsonl.
        probe_tokens: Further tokens to probe, such as [";", "<think>", 151643]: each a text that is one token of the
            policy's tokenizer, or an id. A token is probed in the first two responses of the first validation that have
            it, or else as the first token of a response.
        details_every: Steps between the more expensive measurements, starting at step 1: histograms of rewards,
            lengths, tokens and times, and the memory of each role. 0 disables them.
        replay_rows: Mixtures of experts: trajectories per detailed step whose logprobs the learner computes twice, with
            the engine's routing and with its own, for `router/k3_kl/*` and `router/logprobs_diff_mean/*`. Costs two
            forward passes over them; 0 disables it.
        report: Write report.html when the trainer ends.
        report_every: Also write it every N steps, in a separate process; 0 writes it only at the end.
        trace_memory: Also record which lines of code allocated the trainer's memory. Exact, but slow.
        peak_tflops: Peak throughput of one training device in TFLOP/s for its dtype (312 for an A100 in bfloat16), used
            for `perf/mfu/*`; none leaves these metrics out.
        trackers: Trackers beside the console and metrics.jsonl: "tensorboard" (in the run's folder), "wandb" (respects
            WANDB_MODE=offline) and "mlflow".
        wandb_project: Weights & Biases project.
        mlflow_uri: MLflow tracking server, or a database such as "sqlite:///runs/mlflow.db". A password can be "$NAME",
            an environment variable. none uses MLFLOW_TRACKING_URI, or else a database in the run's folder.
        mlflow_experiment: MLflow experiment.
    """

    console: ConsoleKind = "auto"
    strict: bool = False
    log_val_generations: NonNegativeInt = 20
    log_rollouts: NonNegativeInt = 8
    log_rollout_tokens: PositiveInt = 8192
    probes: NonNegativeInt = 8
    probe_tokens: tuple[int | str, ...] = ()
    details_every: NonNegativeInt = 5
    replay_rows: NonNegativeInt = 16
    report: bool = True
    report_every: NonNegativeInt = 50
    trace_memory: bool = False
    peak_tflops: PositiveFloat | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    wandb_project: str = "rl"
    mlflow_uri: str | None = None
    mlflow_experiment: str = "rl"

    def has_details(self, step: int) -> bool:
        """True if the more expensive measurements are due in a step; steps count from 1."""
        return bool(self.details_every) and (step - 1) % self.details_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Health checks during training; `rl-metrics rules` lists the rules and their thresholds.

    Attributes:
        enabled: Check the run's health, write health.json and report findings.
        every: Steps between two checks.
        pause_on: Rules whose findings write a checkpoint and stop the run with exit status 3. "critical" or "warning"
            means every finding of at least that severity.
        thresholds: Overrides of thresholds by rule and name, such as `{ "kl_high.max" = 0.05 }`.
        off: Rules to disable.
    """

    enabled: bool = True
    every: PositiveInt = 10
    pause_on: tuple[str, ...] = ()
    thresholds: dict[str, float] = field(default_factory=dict)
    off: tuple[str, ...] = ()


UPDATE_KL = ("actor/ppo_kl", "rollout_corr/kl")
"""Metrics of the distance between the policy and the one that sampled."""


ORIGINS = """Settings come from the command line, then environment variables (RL__TRAINER__STEPS=20), then the file.
Relative paths start at the current folder. Exit status: 0 finished; 1 failed; 2 a mistake in settings or files;
3 paused by health.pause_on; 130 or 143 stopped by Ctrl-C or SIGTERM. Pausing and stopping save a checkpoint; a second
signal ends the run at once."""


class Settings(BaseModel):
    """All settings of a run, in the order of use; a trainer with further settings derives from it.

    Attributes:
        command: The command that they are settings of.
        notes: What its help says about all of them.
        also_changeable_on_resume: Further settings that may differ when a run is resumed.
        left_out: Settings that the command does not have; "reward." stands for all of a section.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    command: ClassVar[str] = "train"
    notes: ClassVar[str] = ORIGINS
    also_changeable_on_resume: ClassVar[tuple[str, ...]] = ()
    left_out: ClassVar[tuple[str, ...]] = ()

    run: RunSettings = Field(default_factory=RunSettings)
    policy: PolicySettings
    prompts: PromptSettings
    reward: RewardOptions = Field(default_factory=RewardOptions)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    optimizer: LearnerOptions = Field(default_factory=LearnerOptions)
    lora: LoraOptions = Field(default_factory=LoraOptions)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)
    metrics: MetricSettings = Field(default_factory=MetricSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    critic: CriticSettings = Field(default_factory=CriticSettings)
    correction: CorrectionSettings = Field(default_factory=CorrectionSettings)
    distillation: DistillationOptions = Field(default_factory=DistillationOptions)
    dynamic_sampling: RefillOptions = Field(default_factory=RefillOptions)
    rollout_cache: SkipOptions = Field(default_factory=SkipOptions)
    replicas: ReplicaSettings = Field(default_factory=ReplicaSettings)
    parallel: ParallelOptions = Field(default_factory=ParallelOptions)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    weights: WeightSettings = Field(default_factory=WeightSettings)

    @property
    def placements(self) -> dict[str, str]:
        """Where each part of the run is placed, by the setting that decides it."""
        return {"cluster.placement": self.cluster.placement, "rollout.placement": self.rollout.placement}

    @property
    def file(self) -> Path | None:
        """The settings file, if there is one."""
        return self.__dict__.get("_file")  # not a field, so that equal settings from two files compare equal

    def remember_file(self, file: Path | None) -> None:
        """Keep the path of the settings file, for error messages."""
        self.__dict__["_file"] = file

    @property
    def zero_metrics(self) -> tuple[str, ...]:
        """Metrics that are 0 by design, because a step's only update starts from the policy that sampled."""
        return ("training/staleness/mean", *(UPDATE_KL if self.has_one_update else ()))

    @property
    def has_one_update(self) -> bool:
        """True if each step updates the policy once."""
        return self.trainer.minibatches == self.trainer.epochs == 1

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return self.run.directory / self.run.name

    @property
    def image_folder(self) -> Path | None:
        """Folder of the run's images, which every role reads; None for a run whose prompts have none."""
        folder = self.run_folder / "images"
        return folder.absolute() if folder.is_dir() else None


SettingsT = TypeVar("SettingsT", bound=Settings)
