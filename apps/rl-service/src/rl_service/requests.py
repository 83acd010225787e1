"""What clients ask for, in JSON: the fields of each request. Unknown fields are refused by name."""

from typing import Any, Literal

import msgspec


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request; `type` repeats its name and has no effect."""

    type: str | None = None


class ClientConfig(Request):
    """Asks for the server's switches."""

    sdk_version: str = ""


class CreateSession(Request):
    """Begins a session, which owns training and sampling clients."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Request):
    """A sign of life of a session."""

    session_id: str


class LoraConfig(Request):
    """The adapter of a training client."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Request):
    """The optimizer of a training client."""

    version: int | None = None


class CreateModel(Request):
    """Creates a training client."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)


class OfModel(Request):
    """Names a training client."""

    model_id: str


class Ordered(OfModel):
    """A request that runs in the order of `seq_id`, from 1 for each training client."""

    seq_id: int


class AdamParams(Request):
    """Adam's settings of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Ordered):
    """Takes an optimizer step; `optimizer_params` are those of optimizers other than Adam."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Ordered):
    """Saves weights and optimizer under a name."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Ordered):
    """Saves weights to sample from: under a name, or for a new sampling client."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(Ordered):
    """Saves weights to download, under a name; encrypted for recipients of age, if there are some."""

    path: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class TimeToLive(Request):
    """Sets how long saved weights are kept; None is forever."""

    ttl_seconds: int | None = None


class LoadWeights(Request):
    """Loads saved weights into a training client: an existing one, or a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Request):
    """Creates a sampling client of the base model, or of saved weights."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Request):
    """A part of a prompt; `tokens` if it is text."""

    tokens: list[int] | None = None
    data: str | None = None
    format: str | None = None
    location: str | None = None
    dmel: str | None = None
    expected_tokens: int | None = None
    height: int | None = None
    width: int | None = None


class Prompt(Request):
    """A prompt in parts."""

    chunks: list[Chunk]


class SamplingParams(Request):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Request):
    """Samples from a sampling client, or scores its prompt."""

    prompt: Prompt
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(Request):
    """Asks for a result."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Request):
    """Says that a result is no longer needed."""

    request_id: str


class WeightsPath(Request):
    """Names saved weights."""

    tinker_path: str


class FinishSession(Request):
    """Ends a session."""

    reason: dict[str, Any] = {}
    detail: str | None = None
