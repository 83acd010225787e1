"""Enforces structures of responses with llguidance, as a backend of vLLM's structured outputs."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import llguidance
import llguidance.torch
import torch
from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from rl_core.errors import EngineError, SettingsError
from rl_core.files import run_trial
from rl_rollout.engines.protocol import Structure
from rl_rollout.prompts.tokenizer import PromptTokenizer

STRUCTURES = ("json_schema", "regex", "choices", "grammar")
TRIAL = Path(__file__).parents[1] / "structure_trial.py"
MAX_KEPT = 64
"""Maximum number of cached compiled structures. Agents reuse the same ones."""


class StructuredOutputs:
    """Compiles structures outside of the engine's thread, and passes vLLM a copy for each request."""

    def __init__(self, model_dir: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        """Create without loading anything.

        Args:
            model_dir: The model folder, with the tokenizer.
            vocab_size: Size of the model's vocabulary.
            end_token_ids: Tokens that end a response.
        """
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._matcher = lru_cache(MAX_KEPT)(self._compile)

    def prepare(self, structure: Structure) -> None:
        """Compile a structure, after a child process with limited memory and time has succeeded.

        Raises:
            EngineError: The structure is invalid or too large.
        """
        run_trial(
            TRIAL,
            {"grammar": _grammar(structure)},
            files=(),
            libraries=["llguidance"],
            error=EngineError,
            what=f"the structure's {structure.kinds[0]}",
        )
        try:
            self._matcher(_grammar(structure))
        except (SettingsError, ValueError) as error:  # llguidance raises this for an unsupported tokenizer
            raise EngineError(f"structures need the model's tokenizer: {error}") from error

    def compile_grammar(
        self,
        request_type: object,  # noqa: ARG002 - vLLM's interface
        grammar_spec: str,
        stop_token_ids: object = None,  # noqa: ARG002 - vLLM's interface
    ) -> GuidanceGrammar:
        """Return the state of a request in its structure. Called by vLLM."""
        return GuidanceGrammar(self._matcher(grammar_spec).deep_copy(), self._tokenizer, self._vocab_size)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Allocate one bit per token. Called by vLLM."""
        mask: torch.Tensor = llguidance.torch.allocate_token_bitmask(max_num_seqs, self._vocab_size)
        return mask

    def destroy(self) -> None:
        """Do nothing, because there are no resources to free. Called by vLLM."""

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            fast = PromptTokenizer.load(self._model_dir).as_json
            self._tokenizer = llguidance.LLTokenizer(
                fast, n_vocab=self._vocab_size, eos_token=list(self._end_token_ids) or None
            )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.get_error():
            raise EngineError(f"the structure cannot be enforced with this model's tokens: {matcher.get_error()}")
        return matcher


def constrain(params: VLLMSamplingParams, structure: Structure) -> None:
    """Request a structure from vLLM, by the text it was prepared under."""
    params.structured_outputs = StructuredOutputsParams(grammar=_grammar(structure))


def failure_of(request: Request) -> str | None:
    """Return why a finished response violates its structure; truncation is not a failure."""
    asked: Any = request.structured_output_request
    if asked is None:
        return None
    grammar = asked.grammar
    error = grammar.ll_matcher.get_error() if isinstance(grammar, GuidanceGrammar) else f"{grammar!r}"
    return f"the structure could not be enforced until the end: {error.partition(chr(10))[0]}" if error else None


def _grammar(structure: Structure) -> str:
    if structure.json_schema is not None:
        return str(llguidance.LLMatcher.grammar_from_json_schema(structure.json_schema))
    if structure.regex is not None:
        return str(llguidance.grammar_from("regex", structure.regex))
    if structure.choices:
        return str(llguidance.grammar_from("choice", json.dumps(structure.choices)))
    return str(llguidance.grammar_from("grammar", structure.grammar or ""))
