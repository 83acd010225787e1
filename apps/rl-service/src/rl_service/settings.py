"""Every setting of the service; `serve --help` prints these docstrings.

Values come from, in order of precedence: the command line (`--server.port=8000`), environment variables
(`RL__SERVER__PORT=8000`), the TOML file, the defaults here.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, MinLen
from pydantic import BaseModel, ConfigDict, Field

from rl_core.errors import SettingsError
from rl_core.record_fields import NonNegativeInt, PositiveFloat, PositiveInt
from rl_distill import ModelBackend
from rl_rollout.engines import TransformersOptions, VLLMOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """The model that clients train and sample.

    Attributes:
        path: Hugging Face folder with configuration, tokenizer and safetensors weights.
        names: Names under which clients may ask for it, besides that of its folder, such as "Qwen/Qwen3-8B".
        tokenizer: Folder or hub name from which clients load its tokenizer; none is `path`.
        backend: What computes it in training; see `policy.backend` of the trainers.
    """

    path: Path
    names: tuple[str, ...] = ()
    tokenizer: str | None = None
    backend: ModelBackend = "auto"

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names that requests may use as base model."""
        return (*self.names, self.path.resolve().name, str(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where the service listens, and where it keeps its files.

    Attributes:
        host: Address to listen on. Keys and data are not encrypted: use only loopback or a trusted network.
        port: Port to listen on; 0 chooses a free one.
        key_file: File with the key of all clients, which begins with "tml-"; none keeps one in the service's folder.
        folder: Folder of saved states, journal and metrics; an existing one is continued.
        max_body_bytes: Maximum size of a request body in bytes, after decompression.
        max_connections: Maximum number of connections; see `rl-rollout serve`.
        client_timeout_s: Maximum time in seconds to receive a request, and without the client reading its answer.
        poll_s: Seconds that a client waits for a result before it has to ask again.
        compressed_requests: Ask clients to compress training data with zstd, for slow networks.
    """

    host: str = "127.0.0.1"
    port: NonNegativeInt = 0
    key_file: Path | None = None
    folder: Path = Path("runs/service")
    max_body_bytes: PositiveInt = 64 << 20
    max_connections: PositiveInt = 4096
    client_timeout_s: PositiveFloat = 60.0
    poll_s: Annotated[float, Ge(0)] = 30.0
    compressed_requests: bool = False

    @property
    def own_key_file(self) -> Path:
        """Where the key is."""
        return self.key_file or self.folder / "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What each client may use.

    Attributes:
        max_sessions: Maximum number of open sessions; each program has one.
        max_training_clients: Maximum number of training clients whose weights are in memory.
        max_waiting: Maximum number of waiting requests of a training or sampling client.
        max_waiting_tokens: Maximum number of tokens of these requests.
        max_waiting_bytes: Maximum size of these requests in bytes.
        max_request_tokens: Maximum number of tokens of a training request.
        max_samples: Maximum number of samples of a sampling request.
        kept_results_bytes: Maximum size in bytes of finished results that are kept for clients that ask again.
        kept_results_s: Seconds for which a result is kept after its client has received it.
        kept_snapshots: Number of unnamed sampler weights of a training client that are kept, the newest.
        lapse_s: Seconds without a sign of life, which clients give every 10 s, after which a session ends: its training
            clients are saved and unloaded, and its samples aborted.
    """

    max_sessions: PositiveInt = 1024
    max_training_clients: PositiveInt = 16
    max_waiting: PositiveInt = 4096
    max_waiting_tokens: PositiveInt = 1 << 24
    max_waiting_bytes: PositiveInt = 1 << 30
    max_request_tokens: PositiveInt = 1 << 22
    max_samples: PositiveInt = 1024
    kept_results_bytes: PositiveInt = 1 << 30
    kept_results_s: PositiveFloat = 300.0
    kept_snapshots: PositiveInt = 8
    lapse_s: PositiveFloat = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Adapters of the training clients.

    Attributes:
        max_rank: Maximum rank of an adapter; 0 trains all weights, for one client at a time.
        alpha: An adapter's output is scaled by alpha / rank.
        target_modules: Matrices that get an adapter; see `lora.target_modules` of the trainers.
    """

    max_rank: NonNegativeInt = 32
    alpha: PositiveFloat = 32.0
    target_modules: Annotated[tuple[str, ...], MinLen(1)] = ("all-linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Precision, memory and kernels of the learner; see `optimizer` of the trainers.

    Attributes:
        dtype: Parameter dtype: "float32", or "bfloat16" with float32 master weights.
        micro_batch_tokens: Maximum tokens per micro-batch.
        kernels: "auto", "plain", "fused" or "transformer_engine".
        recompute: "none", "selective" or "full".
        num_threads: Threads of a learner on CPUs; none keeps torch's setting.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: PositiveInt = 8192
    kernels: Literal["auto", "plain", "fused", "transformer_engine"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    num_threads: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine that samples.

    Attributes:
        name: "vllm", "transformers", or the name of an engine that another package installs.
        placement: Where it runs: "process", or "inline" in the server's process, which is easy to debug.
        replicas: Number of engines; each has its own process.
        max_adapters: Number of sampler weights that can be sampled at once, besides the base. Each takes the memory of
            an adapter of lora.max_rank; requests for others wait.
        restarts: How often an engine's process may die and start again while the service runs. Its requests move to
            others or wait.
        start_deadline_s: Maximum time in seconds to start it.
    """

    name: str = "vllm"
    placement: Literal["inline", "process"] = "process"
    replicas: PositiveInt = 1
    max_adapters: PositiveInt = 8
    restarts: NonNegativeInt = 3
    start_deadline_s: PositiveFloat = 600.0


NOTES = """Settings come from the command line, then environment variables (RL__SERVER__PORT=8000), then the file.
Relative paths start at the current folder. Exit status: 0 stopped; 1 failed; 2 a mistake in settings or files."""


class ServiceSettings(BaseModel):
    """All settings of the service."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    command: ClassVar[str] = "serve"
    notes: ClassVar[str] = NOTES
    also_changeable_on_resume: ClassVar[tuple[str, ...]] = ()
    left_out: ClassVar[tuple[str, ...]] = ()

    policy: ServedPolicy
    server: ServerSettings = Field(default_factory=ServerSettings)
    lora: AdapterSettings = Field(default_factory=AdapterSettings)
    limits: ClientLimits = Field(default_factory=ClientLimits)
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)

    def remember_file(self, file: Path | None) -> None:
        """Settings of the service are not read again, so their file is not kept."""


def check_unused(settings: ServiceSettings) -> None:
    """Refuse settings that have no effect beside others.

    Raises:
        SettingsError: Names them.
    """
    chosen = settings.engine
    unused = {"vllm.max_lora_rank": "lora.max_rank decides", "vllm.lora_target_modules": "lora.target_modules decides"}
    if not settings.lora.max_rank:
        unused |= dict.fromkeys(("lora.alpha", "lora.target_modules"), "lora.max_rank = 0 trains all weights")
    if chosen.placement == "inline":
        unused |= dict.fromkeys(("engine.replicas", "engine.restarts"), 'engine.placement = "inline" has one engine')
    if chosen.name == "transformers":
        own = {one.name for one in fields(TransformersOptions)}
        names = [f"vllm.{one.name}" for one in fields(VLLMOptions) if one.name not in own]
        unused |= dict.fromkeys(names, 'engine.name = "transformers" has no such option')
    for name, why in unused.items():
        section, _, key = name.partition(".")
        found = getattr(settings, section)
        if getattr(found, key) != getattr(type(found)(), key):
            raise SettingsError(f"{name} has no effect, because {why}. Leave it out.")
