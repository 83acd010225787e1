"""Environment variables that vLLM reads on import, and isolation of the changes that it makes to its process."""

import logging
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `worker.py` supports only the first one
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # a scored sequence of max_model_len is a prompt with one extra token
    "VLLM_LOGGING_LEVEL": "ERROR",  # suppresses a dozen warnings per start that a user cannot act on
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults. Variables that are already set stay."""

_LEAKED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
"""Variables that vLLM sets for its own processes. They would be inherited by every child process of the caller."""


def prepare_environment() -> None:
    """Set the variables. Called before vllm is first imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in ("torch._library.triton", "torch.utils.flop_counter"):
        logging.getLogger(name).setLevel(logging.ERROR)  # suppresses a warning that Triton is missing


@contextmanager
def unchanged_variables(names: Iterable[str]) -> Iterator[None]:
    """Restore environment variables on exit."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def unchanged_process(num_threads: int) -> Iterator[None]:
    """Undo what vLLM's start does to its process: it seeds the global generators, and reserves torch's threads.

    Args:
        num_threads: Number of torch threads of the calling thread afterwards.
    """
    set_num_threads = torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with unchanged_variables(_LEAKED_VARIABLES), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def kept_process_group(*, is_kept: bool) -> Iterator[None]:
    """Keep the learner's default process group, which vLLM's shutdown would destroy."""
    destroy = torch.distributed.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    if is_kept:
        torch.distributed.destroy_process_group = destroy_others
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy
