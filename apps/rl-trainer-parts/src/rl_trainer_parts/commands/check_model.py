"""`check-model`: what trains, serves and proves a model, its memory and what it lacks, without its weights.

Everything comes from config.json, except the tokens of images, which need the files of their processor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_core.errors import DataError, SettingsError
from rl_core.images import ImageProcessor, encode_image, joined_pixels
from rl_core.terminal_text import bytes_text, counted, json_text, say
from rl_distill import (
    LearnerOptions,
    LoraOptions,
    ParallelOptions,
    PolicyConfig,
    adapted_modules,
    check_layout,
    check_learner,
    count_parameters,
    keeps_state,
    parse_policy_config,
    rank_memory,
    read_policy_config,
    refuse_quantized,
)
from rl_rollout.engines import choose_engine, takes_images
from rl_trainer_parts.checks.model_folder import missing_path

DTYPE = "bfloat16"
LORA = LoraOptions(rank=16)
RANKS = (1, 2, 4, 8, 16, 32, 64)
GPU_BYTES = 80 * 10**9
MAX_LINES = 12
DIVIDED = ("tensor", "pipeline", "context", "expert")
IMAGE_SIZES = ((224, 224), (896, 672))
"""Width and height in pixels of images whose tokens are shown. Some processors cut them into unequally many parts."""


class Way(NamedTuple):
    """A way to divide a model among ranks.

    Attributes:
        name: What is trained, and how it is divided.
        bytes_by_ranks: Bytes on the fullest rank, without activations, by the number of ranks.
    """

    name: str
    bytes_by_ranks: dict[int, int]

    @property
    def ranks_of_80_gb(self) -> int | None:
        """The smallest number of ranks whose memory fits a GPU of 80 GB; None if none does."""
        return next((ranks for ranks, size in self.bytes_by_ranks.items() if size <= GPU_BYTES), None)


def check_model(folder: Path, *, as_json: bool) -> bool:
    """Print what is known about a model; return whether it can be trained.

    Args:
        folder: A model folder with config.json; weights are not read and may be missing.
        as_json: Print one JSON object instead of a table.

    Raises:
        SettingsError: There is no such folder.
        DataError: It has no config.json, or this is not JSON.
    """
    if not folder.is_dir():
        problem = f"{folder} is not a folder." if folder.exists() else missing_path(folder, setting="DIR", kind="model")
        raise SettingsError(problem)
    config_json = read_policy_config(folder)
    try:
        refuse_quantized(config_json)
        found: dict[str, Any] = {"folder": str(folder), "trains": True, **_describe(folder, config_json)}
    except (SettingsError, DataError) as error:
        found = {"folder": str(folder), "trains": False, "refused": str(error).splitlines()}
    if as_json:
        ways = [{**way._asdict(), "ranks_of_80_gb": way.ranks_of_80_gb} for way in found.get("memory", ())]
        say(json_text({**found, "memory": ways}).rstrip("\n"))
    else:
        for name, lines in _table(found):
            for index, line in enumerate(lines):
                say(f"{'' if index else name:<12} {line}".rstrip())
    return bool(found["trains"])


def _describe(folder: Path, config_json: Mapping[str, Any]) -> dict[str, Any]:
    config = parse_policy_config(config_json)
    total, active, _ = count_parameters(config)
    engine = choose_engine(folder)
    backend, why_trained = _backend(config_json, config)
    adapted = _adapted(config)
    return {
        "architecture": config.architecture,
        "backend": backend,
        "backend_why": why_trained,
        "rows": _rows(config),
        "engine": engine.name,
        "engine_why": engine.reason,
        "images": None if config.image_token_id is None else _images(folder),
        "parameters": total,
        "active_parameters": active,
        "dtype": DTYPE,
        "memory": list(_ways(config, has_adapters=bool(adapted))),
        "proven": _proven(config),
        "adapters": dict(adapted),
        "refused": list(_refused(config)),
    }


def _images(folder: Path) -> dict[str, Any]:
    """Return how many tokens an image takes by its size, or why images cannot be used."""
    if not takes_images(folder):
        return {"refused": "need preprocessor_config.json or processor_config.json, and the tokenizer's files"}
    try:
        images = {f"{width} x {height}": _blank(width, height) for width, height in IMAGE_SIZES}
        processor = ImageProcessor.load(folder)
        tokens = {size: processor.num_tokens(image) for size, image in images.items()}
        pixels = [processor.pixels(image) for image in images.values()]
    except Exception as error:  # transformers' processors raise many types
        why = " ".join(str(error).split())
        needs_torchvision = "torchvision" in why.lower()
        return {"refused": "their processor needs torchvision, which is not supported" if needs_torchvision else why}
    try:
        joined_pixels(pixels)
    except ValueError:
        return {"refused": "a processor that cuts images into different numbers of parts is not supported"}
    return {"tokens": tokens}


def _blank(width: int, height: int) -> bytes:
    return encode_image(np.zeros((height, width, 3), np.uint8))


def _backend(config_json: Mapping[str, Any], config: PolicyConfig) -> tuple[str, str]:
    """Return what `policy.backend = "auto"` chooses, and why."""
    if not config.model_json:
        return "megatron", f"our layers compute {config.architecture}, and ranks can divide it"
    reason = f"our layers do not compute {config.architecture}"
    try:
        parse_policy_config(config_json, backend="megatron")
    except SettingsError as error:
        option = str(error).partition(". ")[0]
        reason = reason if option.startswith("architecture ") else option
    return "transformers", f"its own class, whole on each rank, because {reason}"


def _rows(config: PolicyConfig) -> str:
    if not config.model_json:
        return "packed end to end; rows of a prompt share its prefix"
    if keeps_state(config):
        return "padded, because layers keep a state from token to token; no shared prefixes"
    return "packed with shared prefixes, if this gives the class's logprobs at the start; else padded"


def _proven(config: PolicyConfig) -> list[str]:
    at_start = "at the start, the learner's logprobs against transformers' class; no way that differs is used"
    return [
        *([at_start] if config.model_json else []),
        "at each update, each tensor's checksum and its product in live layers, and logprobs of a canary",
    ]


def _adapted(config: PolicyConfig) -> dict[str, int]:
    """Return how many matrices an adapter can change, by the last part of their names."""
    try:
        modules = [name.rpartition(".")[2] for name in adapted_modules(config, LORA)]
    except SettingsError:  # the class has none
        return {}
    return {name: modules.count(name) for name in dict.fromkeys(modules)}


def _ways(config: PolicyConfig, *, has_adapters: bool) -> Iterator[Way]:
    """Yield the memory of all weights and of an adapter, without and with divided weights."""
    whole = {ranks: ParallelOptions(ranks=ranks, distributed_optimizer=True) for ranks in RANKS}
    yield Way("all weights", {ranks: _bytes(config, layout) for ranks, layout in whole.items()})
    divided = {ranks: ParallelOptions(ranks=ranks, shard_weights=True) for ranks in RANKS}
    if _fits(config, divided[1]):
        yield Way("shard_weights", {ranks: _bytes(config, layout) for ranks, layout in divided.items()})
    if not config.model_json:
        sequence = config.mixture is not None
        layouts = {n: ParallelOptions(ranks=n, tensor=n, sequence=sequence and n > 1) for n in RANKS}
        fitting = {ranks: layout for ranks, layout in layouts.items() if _fits(config, layout)}
        yield Way("tensor = ranks", {ranks: _bytes(config, layout) for ranks, layout in fitting.items()})
    if has_adapters:
        yield Way(f"LoRA of {LORA.rank}", {ranks: _bytes(config, layout, LORA) for ranks, layout in whole.items()})


def _bytes(config: PolicyConfig, layout: ParallelOptions, lora: LoraOptions = LoraOptions()) -> int:  # noqa: B008
    return max(map(sum, rank_memory(config, layout, dtype=DTYPE, lora=lora)))


def _fits(config: PolicyConfig, layout: ParallelOptions) -> bool:
    try:
        check_layout(layout, config)
    except SettingsError:
        return False
    return True


def _refused(config: PolicyConfig) -> Iterator[str]:
    """Yield what the checks of a run say about settings that this model does not support."""
    layouts = {name: replace(ParallelOptions(ranks=2), **{name: 2}) for name in DIVIDED}  # type: ignore[arg-type]
    refused = [f"parallel.{name}" for name, layout in layouts.items() if not _fits(config, layout)]
    if refused and config.model_json:
        yield f"{', '.join(refused)} above 1: ranks divide only our layers"
    if config.image_token_id is not None:
        yield "parallel.shard_weights, which does not divide a policy with images"
    try:
        options = LearnerOptions(learning_rate=1e-6, recompute="selective")
        check_learner(options, ParallelOptions(), config)
    except SettingsError as error:
        yield f"optimizer.{str(error).partition(';')[0]}"
    if not _adapted(config):
        yield "lora.rank above 0, because no matrix can have an adapter"


def _table(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if not found["trains"]:
        yield "model", [found["folder"]]
        yield "refused", [line[:400] for line in found["refused"][:MAX_LINES]]
        return
    yield "model", [f"{found['architecture']} in {found['folder']}"]
    yield "trained by", [f"{found['backend']} (policy.backend)", found["backend_why"]]
    yield "rows", [found["rows"]]
    yield "served by", [f"{found['engine']} (rollout.engine)", found["engine_why"]]
    if images := found["images"]:
        tokens = [f"{count} tokens for {size} pixels" for size, count in images.get("tokens", {}).items()]
        yield "images", tokens or [f"not usable: {images['refused']}"[:400]]
    total, active = found["parameters"], found["active_parameters"]
    yield "parameters", [f"{total:,}{'' if active == total else f', {active:,} of them active'}"]
    yield "memory", list(_memory(found["memory"]))
    yield "proven", found["proven"]
    modules = found["adapters"]
    count = counted(sum(modules.values()), "matrix", "matrices")
    yield "adapters", [f"on {count}: {', '.join(modules)}" if modules else "none"]
    yield "refused", found["refused"] or ["nothing"]


def _memory(ways: list[Way]) -> Iterator[str]:
    yield f"of each rank in {DTYPE} (weights, gradients, optimizer), without activations"
    yield f"{'ranks':<16}" + "".join(f"{ranks:>11}" for ranks in RANKS[:4]) + "   fits 80 GB"
    for way in ways:
        sizes = (way.bytes_by_ranks.get(ranks) for ranks in RANKS[:4])
        cells = "".join(f"{'-' if size is None else bytes_text(size):>11}" for size in sizes)
        least = "no" if way.ranks_of_80_gb is None else f"from {counted(way.ranks_of_80_gb, 'rank')}"
        yield f"{way.name:<16}{cells}   {least}"
