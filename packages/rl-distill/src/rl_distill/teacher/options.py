"""Options of distillation; imports without torch, so that settings can nest them."""

import math
import re
from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt, MinLen

from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings_record

LossName: TypeAlias = Literal["forward_kl", "reverse_kl", "js", "k1", "abs", "k2", "k3", "uld", "nll"]

DIVERGENCES = ("forward_kl", "reverse_kl", "js")
"""Losses that compare distributions."""
ESTIMATORS = ("k1", "abs", "k2", "k3")
"""Losses that use only the sampled token."""

_TEACHER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@settings_record
class ResourceOptions:
    """Resources reserved for each replica of a teacher, or for each of its ranks.

    Attributes:
        cpus: CPUs; 0 shares all CPUs.
        gpus: GPUs. none reserves one if this machine has GPUs; 0 scores on CPUs.
    """

    cpus: NonNegativeFloat = 0.0
    gpus: NonNegativeFloat | None = None


@settings_record
class TeacherOptions:
    """Options of a teacher.

    Attributes:
        model: Hugging Face folder with configuration, tokenizer and safetensors weights.
        engine: How the teacher scores: "vllm" (prompt logprobs) or "megatron" (a forward pass).
        replicas: Number of replicas that score in parallel.
        resources: Resources reserved for each replica, such as {cpus = 2, gpus = 1}; with tensor > 1, for each of its
            ranks.
        data_sources: Values of distillation.route_by that this teacher scores.
        placement: "process" (processes on this machine) or "ray" (Ray actors, on one or more machines).
        dtype: Computation dtype: "float32" or "bfloat16".
        max_model_len: Maximum trajectory length in tokens; none uses the maximum length of prompt and response.
        tensor: Tensor-parallel size of a replica. Megatron teachers place whole experts of a mixture on ranks where
            they can.
        max_batch_tokens: Maximum tokens scored in one batch; a longer trajectory is scored alone.
        num_threads: CPU threads of a replica; none keeps the library's default.
        kv_cache_gib: Size of vLLM's KV cache in GiB. none uses 1 on CPUs, and on GPUs whatever gpu_memory_utilization
            leaves.
        gpu_memory_utilization: Share of a GPU's memory that vLLM may use, including weights.
        sleep: Free the teacher's memory between steps, if its engine can.
        restarts: How often a replica that dies after its first start is restarted; its unfinished scores are computed
            again.
    """

    model: Path
    engine: Literal["vllm", "megatron"] = "vllm"
    replicas: PositiveInt = 1
    resources: ResourceOptions = field(default_factory=ResourceOptions)
    data_sources: tuple[Annotated[str, MinLen(1)], ...] = ()
    placement: Literal["process", "ray"] = "process"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: PositiveInt | None = None
    tensor: PositiveInt = 1
    max_batch_tokens: PositiveInt = 8192
    num_threads: PositiveInt | None = None
    kv_cache_gib: PositiveFloat | None = None
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.8
    sleep: bool = True
    restarts: NonNegativeInt = 3


@settings_record
class SelfTeacherOptions:
    """A teacher that is the policy itself, with other weights or under another prompt.

    Attributes:
        model: The teacher's weights: "policy" (the current ones), "reference" (the initial ones) or "average" (a moving
            average of the policy's). none turns it off.
        prompts: The teacher's prompts, each a column of the prompts with text or messages, or a template such as
            "{prompt} Hint: {hint}". A template may have columns, {prompt}, {feedback} (a text in the reward's extras)
            and {best_response} (of another session). The first that has a value for each name is used; without any,
            the trajectory has no teacher. An empty list keeps the policy's prompt.
        min_reward: Minimum reward of {best_response}.
        average_decay: Share of the average that each update of the policy keeps.
    """

    model: Literal["policy", "reference", "average"] | None = None
    prompts: tuple[Annotated[str, MinLen(1)], ...] = ()
    min_reward: float = 1.0
    average_decay: Annotated[float, Gt(0), Lt(1)] = 0.95


@settings_record
class DistillationOptions:
    """Distillation from teachers; off unless a teacher or a column of texts is set.

    Attributes:
        teachers: One table per teacher, `[distillation.teachers.NAME]`, with the options below.
        self_teacher: The policy as its own teacher.
        default_teacher: Teacher for values of route_by that no other teacher scores. Without one, a single teacher
            without data_sources scores every prompt.
        route_by: Column of the prompts that selects the teacher: "data_source" or any other.
        loss: "forward_kl", "reverse_kl" and "js" compare distributions. "k1", "abs", "k2" and "k3" compare only the
            sampled token. "uld" compares sorted probabilities, for teachers with another vocabulary. "nll" imitates
            `texts` and needs no teacher.
        distribution: For forward_kl, reverse_kl and js: compare the teacher's "top_k" tokens or its "full" distribution
            (Megatron teachers only).
        top_k: Number of the teacher's most likely tokens to compare; at most 1000.
        tail: How to treat the probability outside the top k: as one extra "bucket", "drop" it, or "renormalise" the
            rest.
        beta: Weight of the teacher in the mixture of js, which at 0 and 1 would be a KL: use that loss then.
        used_as: Add the divergence to the "loss", or use it as a "reward" in the policy gradient (k1, abs, k2 and k3
            only).
        coefficient: Weight of the divergence.
        use_task_rewards: Also train on the task's rewards, with the settings of `[algorithm]`.
        temperature: Temperature of both distributions; vLLM teachers support only 1.
        max_loss: Clamp each token's loss to this maximum; none does not clamp.
        min_logprob: Clamp the logprobs of both sides to this minimum; none does not clamp.
        other_tokenizer: A teacher with another vocabulary: "refuse" it, or "align" its scores by spans of text.
        texts: Column of the prompts with a teacher's texts; the policy trains on them instead of on rollouts.
        cache: Zarr folder that caches teachers' scores: known trajectories are read, new ones are written.
        deadline_s: Maximum time for one step's teacher scores.
        start_deadline_s: Maximum time for a teacher to start or wake.
    """

    teachers: dict[str, TeacherOptions] = field(default_factory=dict)
    self_teacher: SelfTeacherOptions = field(default_factory=SelfTeacherOptions)
    default_teacher: str | None = None
    route_by: Annotated[str, MinLen(1)] = "data_source"
    loss: LossName = "forward_kl"
    distribution: Literal["top_k", "full"] = "top_k"
    top_k: Annotated[int, Ge(1), Le(1000)] = 64
    tail: Literal["bucket", "drop", "renormalise"] = "bucket"
    beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    used_as: Literal["loss", "reward"] = "loss"
    coefficient: PositiveFloat = 1.0
    use_task_rewards: bool = False
    temperature: PositiveFloat = 1.0
    max_loss: PositiveFloat | None = None
    min_logprob: Annotated[float, Gt(-math.inf), Lt(0)] | None = None
    other_tokenizer: Literal["refuse", "align"] = "refuse"
    texts: str | None = None
    cache: Path | None = None
    deadline_s: PositiveFloat = 3600.0
    start_deadline_s: PositiveFloat = 900.0

    @property
    def fallback(self) -> str | None:
        """Teacher of all values that no teacher lists: the default one, or the only one if it lists none."""
        if self.default_teacher is None and len(self.teachers) == 1:
            return next((name for name, teacher in self.teachers.items() if not teacher.data_sources), None)
        return self.default_teacher

    @property
    def is_on(self) -> bool:
        """Whether the policy learns from teachers or from their texts."""
        return self.has_teacher or self.texts is not None

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores tokens: another model, or the policy itself."""
        return bool(self.teachers) or self.self_teacher.model is not None

    @property
    def needs_hidden(self) -> bool:
        """Whether teachers return hidden states, from which the learner computes the full distribution."""
        return self.loss in DIVERGENCES and self.distribution == "full"

    @property
    def num_top(self) -> int:
        """K of the score columns: number of tokens that a teacher returns in addition to the sampled one."""
        return 0 if self.loss in (*ESTIMATORS, "nll") or self.needs_hidden else self.top_k

    def problems(self) -> Iterator[str]:
        """Yield a message for each impossible combination."""
        if self.loss == "nll" and self.texts is None:
            yield 'loss = "nll" imitates a teacher\'s texts; set texts to their column, found none.'
        if not self.is_on:
            yield from self._unused()
            return
        yield from self._combinations()
        if self.self_teacher.model is not None:
            yield from self._self_problems()
        for name, teacher in self.teachers.items():
            if not _TEACHER_NAME.fullmatch(name):
                yield (
                    f"teachers: {name!r} is not a valid teacher name, which is also used in metrics and files. Use "
                    "letters, digits, _ and -, and start with a letter, digit or _."
                )
                continue
            yield from self._teacher_problems(name, teacher)

    def _unused(self) -> Iterator[str]:
        """Yield a message for each option that has no effect because distillation is off."""
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if value not in (option.default, {}, SelfTeacherOptions()) and (name, value) != ("loss", "nll"):
                yield (
                    f"{name} = {str(value)!r} has no effect, since distillation is off. Add "
                    "[distillation.teachers.NAME] or distillation.self_teacher.model, or omit it."
                )

    def _combinations(self) -> Iterator[str]:
        if self.loss == "nll" and self.has_teacher:
            yield 'loss = "nll" imitates texts and needs no teacher; omit teachers, or choose another loss.'
        if not self.has_teacher and self.loss != "nll":
            yield (
                f'loss = "{self.loss}" compares with a teacher; add [distillation.teachers.NAME], or set loss = "nll".'
            )
        if self.used_as == "reward" and self.loss not in ESTIMATORS:
            yield (
                f'used_as = "reward" needs a loss that uses only the sampled token: {", ".join(ESTIMATORS)}; found '
                f'"{self.loss}".'
            )
        if self.distribution == "full" and self.loss not in DIVERGENCES:
            yield (
                f'distribution = "full" needs one of {", ".join(DIVERGENCES)}; loss = "{self.loss}" does not use full '
                'distributions. Leave it at "top_k".'
            )
        if self.other_tokenizer == "align" and self.distribution == "full":
            yield 'other_tokenizer = "align" cannot compare full distributions; set distribution = "top_k".'

    def _self_problems(self) -> Iterator[str]:
        """Yield a message for each option that a policy that teaches itself does not support."""
        model = self.self_teacher.model
        for name in ("teachers", "texts", "default_teacher", "cache", "other_tokenizer"):
            if getattr(self, name) not in (None, {}, "refuse"):
                yield f'self_teacher.model = "{model}" scores all trajectories with the learner; omit {name}.'
        if model == "policy" and not self.self_teacher.prompts:
            yield (
                'self_teacher.model = "policy" needs self_teacher.prompts, since the policy under its own prompt has '
                'nothing to teach itself. Set them, or model = "average" or "reference".'
            )

    def _teacher_problems(self, name: str, teacher: TeacherOptions) -> Iterator[str]:
        """Yield a message for each request that a teacher does not support."""
        if teacher.engine == "vllm" and self.temperature != 1:
            yield (
                f'temperature = {self.temperature:g} needs Megatron teachers, but teachers.{name}.engine = "vllm" '
                "returns logprobs only at temperature 1."
            )
        if teacher.engine == "vllm" and self.needs_hidden:
            yield (
                'distribution = "full" needs Megatron teachers, which return hidden states; found '
                f'teachers.{name}.engine = "vllm".'
            )
