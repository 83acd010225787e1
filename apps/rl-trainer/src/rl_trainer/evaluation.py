"""Greedy responses to validation and test problems."""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from rl_core import Prompt
from rl_core.durable_files import write_durably
from rl_metrics.validation import ValidationResponses, summarize_validation
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.prompts import PromptSet, PromptTokenizer
from rl_rollout.rollout import GroupResult
from rl_trainer.settings import Settings

Run = Callable[[Sequence[Prompt], SamplingParams], Awaitable[Sequence[GroupResult]]]


async def validation_metrics(
    settings: Settings, prompts: PromptSet, run: Run
) -> tuple[dict[str, float], Sequence[GroupResult]]:
    """Greedy responses to prompts: validation metrics, and the responses.

    Args:
        settings: Of the run.
        prompts: All of them, of which `validation_limit` may leave some.
        run: Gives one session of each prompt.
    """
    limit = settings.prompts.validation_limit
    chosen: Sequence[Prompt] = [prompts[index] for index in range(min(len(prompts), limit or len(prompts)))]
    sampling = SamplingParams(max_tokens=settings.rollout.max_response_tokens, temperature=0.0)
    groups = await run(chosen, sampling)
    rows = [(group, group.trajectories[0] if group.trajectories else None) for group in groups]
    components = sorted({key for _, row in rows if row is not None for key in row.reward_components})
    variables = {
        "reward": [np.nan if row is None or row.reward is None else row.reward for _, row in rows],
        **{key: [np.nan if row is None else row.reward_components.get(key, np.nan) for _, row in rows]
           for key in components},
    }  # fmt: skip
    responses = ValidationResponses(
        uids=[group.prompt.uid for group, _ in rows],
        sources=[group.prompt.data_source for group, _ in rows],
        variables=variables,
    )
    return summarize_validation(responses), groups


def write_generations(file: Path, groups: Sequence[GroupResult], tokenizer: PromptTokenizer, *, count: int) -> None:
    """Write the first responses as JSON lines."""
    if count < 1:
        return
    decode = tokenizer.decode
    lines = []
    for group in groups[:count]:
        row = group.trajectories[0] if group.trajectories else None
        response = row.input_ids[row.num_prompt_tokens :] if row is not None else np.empty(0, dtype=np.int32)
        lines.append(
            {
                "prompt_uid": group.prompt.uid,
                "prompt": decode([group.prompt.input_ids])[0],
                "response": decode([response])[0],
                "ground_truth": group.prompt.ground_truth,
                "reward": row.reward if row is not None else None,
                "failure": group.failures[0] if group.failures else None,
            }
        )
    file.parent.mkdir(exist_ok=True)
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_durably(file, content.encode())
