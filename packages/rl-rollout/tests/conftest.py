"""Fixtures: tiny models, one vLLM engine per module, and a server for rewards."""

import asyncio
import contextlib
import json
import multiprocessing
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions


class ProcessState(NamedTuple):
    """Process-wide state that vLLM could change."""

    num_threads: int
    set_num_threads: Any
    torch_state: list[int]
    numpy_state: list[int]
    python_state: Any
    children: int

    @classmethod
    def now(cls) -> "ProcessState":
        import torch  # late, so that tests without engines start fast

        return cls(
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            len(multiprocessing.active_children()),
        )


class StartedEngine(NamedTuple):
    """The vLLM engine, and the state of its process just before and after the start."""

    engine: VLLMEngine
    before: ProcessState
    after: ProcessState


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl_rollout.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl_rollout.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("untied"), is_tied=False)


VISION_TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("\\\n", "")
VISION_TOKENS = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL without weights: configuration, tokenizer of bytes, chat template and image processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("vision")
    texts = [*VISION_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in VISION_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    pixels = {"min_pixels": 56 * 56, "max_pixels": 112 * 112, "patch_size": 14, "merge_size": 2}
    pixels |= {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    files = {
        "tokenizer_config.json": {**special, **names, "extra_special_tokens": names},
        "config.json": {"model_type": "qwen2_5_vl", "image_token_id": 5, "text_config": {}, "vision_config": {}},
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **pixels},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(VISION_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def learner_process_group() -> Iterator[None]:
    """Initialize torch.distributed, as a learner in the same process does before the engine starts."""
    import torch.distributed as dist

    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    assert dist.is_initialized(), "closing the engine destroyed the learner's process group"
    if is_ours:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def started_vllm(tied_model_dir: Path, learner_process_group: None) -> Iterator[StartedEngine]:
    """Start one vLLM engine per module, as a process can hold only one; each test leaves it serving tied_model_dir."""
    options = VLLMOptions(
        max_model_len=128,
        max_num_seqs=64,
        max_num_batched_tokens=192,  # long prompts are computed in pieces
        kv_cache_gib=0.002,  # 65 blocks of 32 tokens: 64 samples fit only while they are short
    )
    engine = VLLMEngine(tied_model_dir, options)
    before = ProcessState.now()
    asyncio.run(engine.start())
    yield StartedEngine(engine, before, ProcessState.now())
    asyncio.run(engine.close())
    asyncio.run(engine.close())


@pytest.fixture
def vllm_engine(started_vllm: StartedEngine) -> VLLMEngine:
    return started_vllm.engine


class Service:
    """A real HTTP server that returns `answers` in order, and repeats the last."""

    def __init__(self) -> None:
        self.answers = [(200, {}, b"1.0")]
        self.requests = []
        self.paths = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                service.requests.append((dict(self.headers), json.loads(body)))
                service.paths.append(self.path)
                answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
                status, headers, content = answer() if callable(answer) else answer
                with contextlib.suppress(ConnectionError):
                    if status is None:
                        self.connection.close()
                        return
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_given):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()
