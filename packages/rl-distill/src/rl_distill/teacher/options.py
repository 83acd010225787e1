"""Options of distillation; imports without torch, so that settings can nest them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Literal, TypeAlias

from rl_core.record_fields import settings_record
from rl_distill.option_values import not_among, not_numbers, not_whole
from rl_distill.options import DTYPES

LossName: TypeAlias = Literal["forward_kl", "reverse_kl", "js", "k1", "abs", "k2", "k3", "uld", "nll"]

DIVERGENCES = ("forward_kl", "reverse_kl", "js")
"""Losses that compare distributions."""
ESTIMATORS = ("k1", "abs", "k2", "k3")
"""Losses of the sampled token alone."""
LOSSES = (*DIVERGENCES, *ESTIMATORS, "uld", "nll")
LARGEST_TOP_K = 1000

_TEACHER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@settings_record
class ResourceOptions:
    """What is set aside for each replica of a teacher, and for each of its ranks.

    Attributes:
        cpus: CPUs; 0 shares what there is.
        gpus: GPUs; none takes one where this machine has GPUs, 0 scores on CPUs.
    """

    cpus: float = 0.0
    gpus: float | None = None

    def problems(self) -> Iterator[str]:
        """What cannot be."""
        yield from not_numbers(self, ("cpus",), at_least=0.0)
        if self.gpus is not None:
            yield from not_numbers(self, ("gpus",), at_least=0.0)


@settings_record
class TeacherOptions:
    """One teacher.

    Attributes:
        model: Hugging Face folder with configuration, tokenizer and safetensors.
        engine: "vllm" (prompt logprobs), or "megatron" (a forward pass).
        replicas: How many score side by side.
        resources: What is set aside for each replica, a table: {cpus = 2, gpus = 1}; with tensor > 1 for each of its
            ranks.
        data_sources: Values of distillation.route_by that it answers for.
        placement: "process" (processes of this machine), or "ray" (actors of Ray, on one machine or many).
        dtype: What it computes in: "float32" or "bfloat16".
        max_model_len: Most tokens of a trajectory; none takes what prompts and responses can have here.
        tensor: Ranks of one replica that share each weight matrix; Megatron's share a mixture's experts whole where
            they can.
        max_batch_tokens: Tokens scored at once; a longer trajectory is scored alone.
        num_threads: CPU threads of a replica; none leaves the library's choice.
        kv_cache_gib: Memory of vLLM's KV cache; none takes 1 on CPUs, and on GPUs what gpu_memory_utilization leaves.
        gpu_memory_utilization: Share of a GPU's memory that vLLM may use, weights included.
        sleep: Free its memory between steps, where its engine can.
        restarts: How often a replica that died after its first start is started again; what it owed is scored anew.
    """

    model: Path
    engine: Literal["vllm", "megatron"] = "vllm"
    replicas: int = 1
    resources: ResourceOptions = field(default_factory=ResourceOptions)
    data_sources: tuple[str, ...] = ()
    placement: Literal["process", "ray"] = "process"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int | None = None
    tensor: int = 1
    max_batch_tokens: int = 8192
    num_threads: int | None = None
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.8
    sleep: bool = True
    restarts: int = 3

    def problems(self) -> Iterator[str]:
        """What cannot be: each names the option, what it must be, and what it is."""
        yield from not_among(self, {"engine": ("vllm", "megatron"), "placement": ("process", "ray"), "dtype": DTYPES})
        yield from not_whole(self, {"replicas": 1, "tensor": 1, "max_batch_tokens": 1, "restarts": 0})
        yield from not_whole(self, {"max_model_len": 1, "num_threads": 1}, or_none=True)
        yield from not_numbers(self, ("gpu_memory_utilization",), above=0.0)
        if self.gpu_memory_utilization > 1:
            yield f"gpu_memory_utilization must be at most 1; found {self.gpu_memory_utilization:g}."
        if self.kv_cache_gib is not None:
            yield from not_numbers(self, ("kv_cache_gib",), above=0.0)
        yield from (f"resources.{problem}" for problem in self.resources.problems())
        if not all(self.data_sources):
            yield f"data_sources must be names, none of them empty; found {list(self.data_sources)}."


@settings_record
class DistillationOptions:
    """What the policy learns from teachers; without a teacher, and without texts, nothing.

    Attributes:
        teachers: A table of each teacher: `[distillation.teachers.NAME]`; options below.
        default_teacher: Name of the teacher for every value of route_by that no other answers for.
        route_by: What tells which teacher scores a prompt: "data_source", or any column of the prompts.
        loss: "forward_kl", "reverse_kl" or "js" compare distributions; "k1", "abs", "k2" or "k3" the sampled token
            alone; "uld" the sorted probabilities, for another vocabulary; "nll" imitates `texts`, without a teacher.
        distribution: Of the first three: the teacher's "top_k" tokens, or its "full" distribution (Megatron teachers).
        top_k: How many of the teacher's likeliest tokens; at most 1000.
        tail: What becomes of the probability outside the top k: a "bucket" of its own, "drop", or "renormalise".
        beta: Share of the teacher in js's mixture.
        used_as: "loss", or "reward" in the policy gradient (k1, abs, k2 and k3 alone).
        coefficient: Weight of it.
        use_task_rewards: Also learn from the rewards, by the settings of `[algorithm]`.
        temperature: Of both distributions; vLLM teachers give 1 alone.
        max_loss: Largest loss of a token; none does not clamp.
        min_logprob: Smallest logprob of either side; none does not clamp.
        other_tokenizer: A teacher with another vocabulary: "refuse", or "align" its scores by spans of text.
        texts: Column of the prompts that has a teacher's text, which is trained on in place of rollouts.
        cache: zarr folder of teachers' scores: read where a trajectory is there, written where it is not.
        deadline_s: Longest wait for teachers in a step.
        start_deadline_s: Longest wait for a teacher to start, or to wake.
    """

    teachers: dict[str, TeacherOptions] = field(default_factory=dict)
    default_teacher: str | None = None
    route_by: str = "data_source"
    loss: LossName = "forward_kl"
    distribution: Literal["top_k", "full"] = "top_k"
    top_k: int = 64
    tail: Literal["bucket", "drop", "renormalise"] = "bucket"
    beta: float = 0.5
    used_as: Literal["loss", "reward"] = "loss"
    coefficient: float = 1.0
    use_task_rewards: bool = False
    temperature: float = 1.0
    max_loss: float | None = None
    min_logprob: float | None = None
    other_tokenizer: Literal["refuse", "align"] = "refuse"
    texts: str | None = None
    cache: Path | None = None
    deadline_s: float = 3600.0
    start_deadline_s: float = 900.0

    @property
    def is_on(self) -> bool:
        """True when the policy learns from teachers or their texts."""
        return bool(self.teachers) or self.texts is not None

    @property
    def needs_hidden(self) -> bool:
        """True when teachers give hidden states, from which the learner makes the whole distribution."""
        return self.loss in DIVERGENCES and self.distribution == "full"

    @property
    def num_top(self) -> int:
        """K of the columns: tokens beside the sampled one that a teacher gives."""
        return 0 if self.loss in (*ESTIMATORS, "nll") or self.needs_hidden else self.top_k

    def problems(self) -> Iterator[str]:
        """What cannot be: each names the option, what it must be, and what it is."""
        if not self.is_on:
            yield from self._unused()
            return
        yield from self._values()
        yield from self._combinations()
        for name, teacher in self.teachers.items():
            if not _TEACHER_NAME.fullmatch(name):
                yield (
                    f"teachers: {name!r} cannot be a teacher's name, which stands in metrics and files. Use letters, "
                    "digits, _ and -, and begin with one of the first three."
                )
                continue
            yield from (f"teachers.{name}.{problem}" for problem in teacher.problems())
            yield from self._teacher_problems(name, teacher)

    def _unused(self) -> Iterator[str]:
        """Settings of a distillation that is not on: whoever wrote them meant it to be."""
        if self.loss == "nll":
            yield 'loss = "nll" imitates texts of a teacher: name their column in texts; found none.'
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "teachers" and value != one.default and (one.name, value) != ("loss", "nll"):
                yield (
                    f"{one.name} = {str(value)!r} is of distillation, which is off: add [distillation.teachers.NAME], "
                    "or leave it out."
                )

    def _values(self) -> Iterator[str]:
        yield from not_among(self, _CHOICES)
        yield from not_whole(self, {"top_k": 1})
        if isinstance(self.top_k, int) and self.top_k > LARGEST_TOP_K:
            yield f"top_k must be at most {LARGEST_TOP_K}; found {self.top_k}."
        yield from not_numbers(self, ("coefficient", "temperature", "deadline_s", "start_deadline_s"), above=0.0)
        yield from not_numbers(self, ("beta",), above=0.0)
        if self.beta >= 1:
            yield f"beta must be above 0 and below 1; found {self.beta:g}. At its ends js is a KL: use that."
        if self.max_loss is not None:
            yield from not_numbers(self, ("max_loss",), above=0.0)
        if self.min_logprob is not None and not self.min_logprob < 0:
            yield f"min_logprob must be below 0, or none; found {self.min_logprob:g}."
        if not self.route_by:
            yield 'route_by must be "data_source" or a column of the prompts; found an empty name.'

    def _combinations(self) -> Iterator[str]:
        if self.loss == "nll" and self.texts is None:
            yield 'loss = "nll" imitates texts of a teacher: name their column in texts; found none.'
        if self.loss == "nll" and self.teachers:
            yield 'loss = "nll" imitates texts without a teacher; leave teachers out, or choose another loss.'
        if not self.teachers and self.loss != "nll":
            yield (
                f'loss = "{self.loss}" compares with a teacher: add [distillation.teachers.NAME], or set loss = "nll".'
            )
        if self.used_as == "reward" and self.loss not in ESTIMATORS:
            yield (
                f'used_as = "reward" needs a loss of the sampled token alone: {", ".join(ESTIMATORS)}; '
                f'found "{self.loss}".'
            )
        if self.distribution == "full" and self.loss not in DIVERGENCES:
            yield (
                f'distribution = "full" is for {", ".join(DIVERGENCES)}; loss = "{self.loss}" does not look at the '
                'whole distribution. Leave it at "top_k".'
            )
        if self.other_tokenizer == "align" and self.distribution == "full":
            yield 'other_tokenizer = "align" has no whole distribution to compare; set distribution = "top_k".'

    def _teacher_problems(self, name: str, teacher: TeacherOptions) -> Iterator[str]:
        """What one teacher cannot give of what is asked."""
        if teacher.engine == "vllm" and self.temperature != 1:
            yield (
                f"temperature = {self.temperature:g} needs Megatron teachers, but teachers.{name}.engine = "
                '"vllm" gives logprobs at temperature 1 alone.'
            )
        if teacher.engine == "vllm" and self.needs_hidden:
            yield (
                f'distribution = "full" needs Megatron teachers, which give hidden states; teachers.{name}.engine = '
                '"vllm".'
            )


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "loss": LOSSES,
    "distribution": ("top_k", "full"),
    "tail": ("bucket", "drop", "renormalise"),
    "used_as": ("loss", "reward"),
    "use_task_rewards": (False, True),
    "other_tokenizer": ("refuse", "align"),
}
