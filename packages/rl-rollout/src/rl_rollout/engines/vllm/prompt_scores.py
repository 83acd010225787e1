"""Logprobs of prompts and of their most likely alternatives, in vLLM's workers, in bounded memory.

vLLM's own implementation keeps a step's logits of all tokens of a sequence, [tokens, V] twice in float32: 10 GB for
8,192 tokens and a vocabulary of 151,936. It also ranks each token with a function that torch compiles, for a number
that is unused here.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

MAX_ROWS = 512
"""Number of tokens whose logits are in memory at once. With fewer, the output matrix is read too often."""


def gather_without_ranks(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Return each row's token, then the row's most likely tokens.

    Args:
        logprobs: [N, V].
        num_logprobs: K.
        token_ids: [N] int64.

    Returns:
        [N, K + 1] int32 ids with their logprobs; ranks are 0.
    """
    columns = token_ids.unsqueeze(-1)
    if num_logprobs:
        columns = torch.cat([columns, logprobs.topk(num_logprobs, dim=-1).indices], dim=-1)
    return LogprobsTensors(columns.to(torch.int32), logprobs.gather(-1, columns), torch.zeros_like(token_ids))


def score_in_pieces(runner: Any) -> None:
    """Make a worker's model runner score prompts with `score_prompts`, and rank no token."""
    runner.sampler.gather_logprobs = gather_without_ranks
    runner._get_prompt_logprobs_dict = MethodType(score_prompts, runner)


def score_prompts(
    runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]
) -> dict[str, LogprobsTensors]:
    """Replace vLLM's `_get_prompt_logprobs_dict`: return the scores of the prompts that this step completes.

    Args:
        runner: vLLM's model runner.
        hidden_states: [tokens of the step, H].
        num_scheduled_tokens: Number for each request in the step.

    Returns:
        By request, [P - 1, K + 1] for its P prompt tokens after the first.
    """
    completed: dict[str, LogprobsTensors] = {}
    for request_id, top_k in runner.num_prompt_logprobs.items():
        num_tokens = num_scheduled_tokens.get(request_id)
        if num_tokens is None:  # not in this step
            continue
        request = runner.requests[request_id]
        num_scores = len(request.prompt_token_ids) - 1
        start = request.num_computed_tokens
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(num_scores, top_k + 1)
        scores = request.in_progress_prompt_logprobs_cpu
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
        end = min(start + num_tokens, num_scores)
        targets = torch.tensor(request.prompt_token_ids[start + 1 : end + 1], device=hidden_states.device)
        _fill(runner, scores, hidden_states[offset : offset + max(end - start, 0)], targets, start)
        if start + num_tokens > num_scores:  # vLLM sends them with the token sampled after the prompt
            completed[request_id] = scores
    for request_id in completed:
        del runner.num_prompt_logprobs[request_id]
        runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
    return completed


def _fill(
    runner: Any, scores: LogprobsTensors, hidden_states: torch.Tensor, token_ids: torch.Tensor, start: int
) -> None:
    """Write the scores of token_ids, which hidden_states predict, to their rows from start on."""
    top_k = scores.logprobs.shape[1] - 1
    for begin in range(0, len(token_ids), MAX_ROWS):
        piece = slice(begin, begin + MAX_ROWS)
        logprobs = runner.sampler.compute_logprobs(runner.model.compute_logits(hidden_states[piece]))
        found = gather_without_ranks(logprobs, top_k, token_ids[piece])
        rows = slice(start + begin, start + begin + len(logprobs))
        scores.logprob_token_ids[rows].copy_(found.logprob_token_ids)
        scores.logprobs[rows].copy_(found.logprobs)
