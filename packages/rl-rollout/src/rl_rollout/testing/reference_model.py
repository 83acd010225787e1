# ruff: noqa: S101 - part of a test suite
"""A tiny model, and its logprobs in transformers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_core.data import FloatArray, IntArray
from rl_core.errors import EngineError
from rl_core.record_fields import converts_arguments
from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, Canary, folder_views
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.engines.weight_checks import module_of

Answer = TypeVar("Answer")
TIED_HEAD = {"lm_head.weight": "model.embed_tokens.weight"}
LINEAR_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
END = "<end>"
CHARACTERS = 'ab{}":,123'
UPDATE_DEADLINE_S = 300.0
"""Deadline of an update beside running requests, long enough for a busy machine."""
EMOJI = "\N{GRINNING FACE}"
"""A character of four bytes. Each byte is a token."""


@converts_arguments
def reference_logprobs(
    model_dir: Path, sequence: IntArray, *, tensors: Mapping[str, torch.Tensor] | None = None
) -> FloatArray:
    """Return [T, V] logprobs after each token, by transformers in float32; `tensors` replaces all weights."""
    return reference_rows(model_dir, [sequence], tensors=tensors)[0]


def reference_rows(
    model_dir: Path, sequences: Sequence[IntArray], *, tensors: Mapping[str, torch.Tensor] | None = None
) -> list[FloatArray]:
    """Return the `reference_logprobs` of each sequence. The model is loaded once."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    if tensors is not None:
        live = folder_views(model, model.state_dict())
        differing = (live.keys() ^ tensors.keys()) - TIED_HEAD.keys()
        assert not differing, f"{sorted(differing)} must be in both the model and the given tensors"
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
    with torch.inference_mode():
        ids = [torch.from_numpy(sequence.astype(np.int64)).unsqueeze(0) for sequence in sequences]
        return [model(one).logits[0].float().log_softmax(-1).numpy() for one in ids]


def token_logprobs(rows: FloatArray, sequence: IntArray) -> FloatArray:
    """Return the [T - 1] logprobs of the tokens after the first, from [T, V]."""
    chosen: FloatArray = rows[np.arange(len(sequence) - 1), sequence[1:]]
    return chosen


def canary_of(model_dir: Path, tensors: Mapping[str, torch.Tensor], sequence: IntArray) -> Canary:
    """Return a canary: a sequence with its logprobs under these weights in transformers."""
    logprobs = token_logprobs(reference_logprobs(model_dir, sequence, tensors=tensors), sequence)
    return Canary(sequences=[sequence], logprobs=[np.concatenate([[0.0], logprobs]).astype(np.float32)])


def processed(
    row: FloatArray, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> dict[int, float]:
    """Return the logprob of each token left by temperature, then top_k, then top_p, from [V] logprobs."""
    scaled = np.exp(row / temperature)
    probabilities = scaled / scaled.sum()
    order: Sequence[int] = np.argsort(-probabilities).tolist()
    kept = order[:top_k]
    before, nucleus = 0.0, []
    total = probabilities[kept].sum()
    for index in kept:
        if top_p < 1 and before >= top_p:  # rounding may reach 1 before the last token
            break
        nucleus.append(index)
        before += float(probabilities[index] / total)
    logprobs = np.log(probabilities[nucleus] / probabilities[nucleus].sum())
    return dict(zip(nucleus, logprobs.tolist(), strict=True))


@converts_arguments
def make_tiny_model(model_dir: Path, *, is_tied: bool, seed: int = 0, vocab_size: int = 32) -> Path:
    """Write a random Qwen3 with 0.1M float32 parameters, end token 1 and 256 positions, and its tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(model_dir)
    write_tiny_tokenizer(model_dir, vocab_size=vocab_size)
    return model_dir


def write_tiny_tokenizer(model_dir: Path, *, vocab_size: int) -> None:
    """Write a tokenizer of `CHARACTERS`, the bytes of `EMOJI`, and pairs of characters, without merges."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((singles, _),) = shown.pre_tokenize_str(CHARACTERS + EMOJI)
    pairs = [first + second for first in CHARACTERS for second in CHARACTERS]
    texts = ["<pad>", END, *singles, *pairs][:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = shown, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts[:2]])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<pad>"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(special))


def make_adapter(
    tensors: Mapping[str, torch.Tensor], *, rank: int, seed: int, kinds: Sequence[str] = LINEAR_KINDS
) -> dict[str, torch.Tensor]:
    """Return a random A and B for each matrix of these kinds, with peft's names. Neither is zero."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in kinds:
            rows, columns = tensor.shape
            adapter[f"{PEFT_PREFIX}{module}{LORA_A}"] = 0.15 * torch.randn(rank, columns, generator=generator)
            adapter[f"{PEFT_PREFIX}{module}{LORA_B}"] = 0.15 * torch.randn(rows, rank, generator=generator)
    return adapter


def merged(tensors: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with W + B @ A instead of each W that the adapter changes."""
    found = dict(tensors)
    for name, tensor in adapter.items():
        if name.endswith(LORA_A):
            module = module_of(name)
            found[f"{module}.weight"] = tensors[f"{module}.weight"] + adapter[f"{PEFT_PREFIX}{module}{LORA_B}"] @ tensor
    return found


def perturbed(tensors: Mapping[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
    """Return the tensors with fixed noise."""
    generator = torch.Generator().manual_seed(0)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


PROMPT = np.array([5, 9, 14, 3, 22], dtype=np.int32)


@contextmanager
def refuses(words: str) -> Iterator[None]:
    """Expect an EngineError whose message contains these words."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    assert isinstance(found, EngineError), f"expected an EngineError about {words!r}; found {found!r}"
    assert words in str(found)


def generate(engine: RolloutEngine, *, num_samples: int = 1, max_tokens: int = 8, **sampling: Any) -> list[Generation]:
    """Return responses to PROMPT, generated in a new event loop."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return asyncio.run(engine.generate(GenerateRequest(input_ids=PROMPT, sampling=params, num_samples=num_samples)))


def short_request(*, seed: int, prompt: IntArray = PROMPT) -> GenerateRequest:
    """Return a request for at most 8 tokens."""
    return GenerateRequest(input_ids=prompt, sampling=SamplingParams(max_tokens=8, seed=seed))


def long_request_of(engine: RolloutEngine, *, seed: int) -> GenerateRequest:
    """Return a request for as many tokens as fit, up to 256 with the prompt."""
    max_tokens = min(engine.traits.max_model_len, 256) - len(PROMPT)
    return GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=max_tokens, seed=seed))


def long_request(engine: RolloutEngine) -> GenerateRequest:
    """Return a request with a long response: at least 40 tokens, or three quarters of what fits."""
    for seed in range(100):
        request = long_request_of(engine, seed=seed)
        (sampling,) = request.samplings
        wanted = min(40, 3 * sampling.max_tokens // 4)
        if len(asyncio.run(engine.generate(request))[0].token_ids) >= wanted:
            return request
    raise AssertionError(f"no response of {wanted} tokens in 100 draws; use a model that ends its responses less often")


async def begin(engine: RolloutEngine, request: GenerateRequest) -> "asyncio.Future[list[Generation]]":
    """Start a request, and return when shorter requests that began later have ended: it has tokens but is not finished.

    There are several shorter requests, so that one also shares its replica if the engine has several.
    """
    running = asyncio.ensure_future(engine.generate(request))
    await asyncio.sleep(0)
    short = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=3, seed=1))
    await asyncio.gather(*(engine.generate(short) for _ in range(6)))
    return running


async def answers_during(
    engine: RolloutEngine, ask: Callable[[], Awaitable[Answer]], update: Callable[[], Awaitable[object]]
) -> list[Answer]:
    """Return the answers to a question that is repeated until an update has ended.

    It is asked twice at a time, begun at different moments, so that the update finds an unfinished answer.
    """
    answers: list[Answer] = []
    updated = asyncio.Event()

    async def repeat() -> None:
        while not updated.is_set():
            answers.append(await ask())

    async with asyncio.timeout(UPDATE_DEADLINE_S), asyncio.TaskGroup() as tasks:
        for seed in range(2):
            tasks.create_task(repeat())
            await begin(engine, short_request(seed=seed))
        try:
            await update()
        finally:
            updated.set()
    return answers


def joined(prompt: IntArray, sample: Generation) -> IntArray:
    """Concatenate prompt and response."""
    return np.concatenate([prompt, sample.token_ids]).astype(np.int32)
