"""This project's engine in benchmarks/lora.py: with an adapter, with merged weights, or without an adapter."""

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _lora_workload import ADAPTER, FULL, MAX_TOKENS, NUM_SAMPLES, OURS, POLICY, PRESETS, PROMPT_TOKENS, RANKS
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rl_core.data import IntArray
from rl_core.weights import (
    LORA_A,
    LORA_B,
    PEFT_PREFIX,
    AdapterUpdate,
    Canary,
    InProcess,
    ProofTolerances,
    TensorTransport,
    WeightUpdate,
    digest_tensors,
    publish_weights,
)
from rl_rollout import SamplingParams
from rl_rollout.engines import GenerateRequest, RolloutEngine, TransformersOptions, VLLMOptions
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.engines.vllm import VLLMEngine

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
SCALING = 2.0
NUM_CANARIES, CANARY_TOKENS = 4, PROMPT_TOKENS


class Engine:
    """An engine that has loaded its weights once."""

    def __init__(self, folder: Path, preset: str, system: str, *, is_quick: bool) -> None:
        """Start it.

        Args:
            folder: Folder with the policy and its adapter.
            preset: A preset in `PRESETS`.
            system: What the engine serves.
            is_quick: Use the transformers engine instead of vLLM.
        """
        self._base = load_file(folder / POLICY / "model.safetensors")
        adapter = load_file(folder / ADAPTER / "adapter_model.safetensors")
        self._adapter = {name: SCALING * of if name.endswith(LORA_B) else of for name, of in adapter.items()}
        self._tensors = {OURS: self._adapter, FULL: self._base}.get(system) or merged(self._base, self._adapter)
        self._told = None
        if system == OURS:
            self._told = AdapterUpdate(rank=RANKS[preset], base=digest_tensors(self._base))
        rank = RANKS[preset] if system == OURS else 0
        self._engine: RolloutEngine = TransformersEngine(folder / POLICY, TransformersOptions(max_lora_rank=rank))
        if not is_quick:
            options = VLLMOptions(max_model_len=128, kv_cache_gib=0.5, max_num_seqs=NUM_SAMPLES, max_lora_rank=rank)
            self._engine = VLLMEngine(folder / POLICY, options)
        self._vocab_size, self._max_tokens = PRESETS[preset].policy["vocab_size"], MAX_TOKENS[preset]
        self._version = 0
        self._slot_s = timed_slot() if system == OURS and not is_quick else None
        self._canary = asyncio.run(self._start())

    async def _start(self) -> Canary:
        await self._engine.start()
        sequences = list(self._draw(NUM_CANARIES, CANARY_TOKENS, seed=0))
        await self._engine.update_weights(self._pack())
        scores = await self._engine.score(sequences)
        return Canary(sequences=sequences, logprobs=[one.token_logprobs for one in scores])

    def update(self) -> dict[str, float]:
        """Load the weights again as a new version.

        Returns:
            update_ms: for an adapter in vLLM, writing its slot and reading it back, else until the engine has answered;
            proven_ms: including probes of all weights and the canary; processor_ms of these, if known; num_bytes of
            tensors and message; and tensor_bytes.
        """
        return asyncio.run(self._update())

    async def _update(self) -> dict[str, float]:
        update, slot_s = self._pack(), self._slot_s
        if slot_s is not None:
            slot_s.clear()
        started = clocks()
        report = await publish_weights(update, [self._engine], canary=self._canary, tolerances=ProofTolerances())
        proven = clocks() - started
        slot = None if slot_s is None else np.sum(slot_s, axis=0)
        return {
            **({} if slot is None else {"update_processor_ms": 1e3 * slot[1]}),
            "update_ms": 1e3 * (report.update_s if slot is None else slot[0]),
            "proven_ms": 1e3 * proven[0],
            "proven_processor_ms": 1e3 * proven[1],
            "num_bytes": num_bytes(update),
            "tensor_bytes": sum(tensor.nbytes for tensor in self._tensors.values()),
        }

    def _pack(self) -> WeightUpdate:
        self._version += 1
        return TensorTransport().pack(self._tensors, version=self._version, tied=TIED, adapter=self._told)

    def generate(self, *, seed: int) -> int:
        """Sample responses of maximum length; return the number of sampled tokens."""
        return asyncio.run(self._generate(seed))

    async def _generate(self, seed: int) -> int:
        sampling = SamplingParams(max_tokens=self._max_tokens)
        prompts = self._draw(NUM_SAMPLES, PROMPT_TOKENS, seed=seed)
        requests = (GenerateRequest(input_ids=ids, sampling=sampling) for ids in prompts)
        found = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        return sum(len(sample.token_ids) for samples in found for sample in samples)

    def _draw(self, rows: int, tokens: int, *, seed: int) -> IntArray:
        return np.random.default_rng(seed).integers(2, self._vocab_size, (rows, tokens), dtype=np.int32)


def clocks() -> NDArray[np.float64]:
    """Return wall seconds and processor seconds of all threads of the process."""
    return np.array([time.perf_counter(), time.process_time()])


def timed_slot() -> list[NDArray[np.float64]]:
    """Record `clocks` of each call in which vLLM's worker writes an adapter into its slot or reads it back."""
    from rl_rollout.engines.vllm.adapter_slots import AdapterSlots

    taken: list[NDArray[np.float64]] = []

    def timed(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            started = clocks()
            found = act(*words)
            taken.append(clocks() - started)
            return found

        return call

    for name in ("replace", "live_parts", "problems"):
        setattr(AdapterSlots, name, timed(getattr(AdapterSlots, name)))
    return taken


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all weights with the adapter merged."""
    found = dict(base)
    for name, a in adapter.items():
        if name.endswith(LORA_A):
            stem = name.removesuffix(LORA_A)
            of = stem.removeprefix(PEFT_PREFIX) + ".weight"
            found[of] = torch.addmm(base[of], adapter[stem + LORA_B], a)
    return found


def num_bytes(update: WeightUpdate) -> int:
    """Return the bytes of an update's tensors and of its message."""
    assert isinstance(update.location, InProcess)
    message = pickle.dumps(replace(update, location=InProcess(tensors={})))
    return sum(of.nbytes for of in update.location.tensors.values()) + len(message)
