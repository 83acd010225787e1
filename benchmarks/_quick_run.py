"""A short training run for --quick: a tiny policy with random weights on the reference engine."""

import json
from pathlib import Path

from _digits import write_tokenizer
from _rollout_workload import PRESETS, RAGGED, write_policy

SETTINGS = """[policy]
path = "{folder}/policy"

[prompts]
train = "{folder}/prompts.jsonl"
validation = "{folder}/prompts.jsonl"
max_tokens = 4

[reward]
function = "exact_match"

[rollout]
engine = "transformers"
placement = "inline"
prompts_per_step = 4
group_size = 4
max_response_tokens = 8

[optimizer]
num_threads = 1

[trainer]
validate_every = 2
checkpoint_every = 0
"""


def write_quick_run(folder: Path) -> Path:
    """Write everything that the run needs into the folder; return the settings file."""
    write_policy(PRESETS["tiny"], RAGGED, folder / "policy")
    write_tokenizer(folder / "policy")
    rows = [{"data_source": "none", "prompt": f"{number:02}", "answer": f"{number}"} for number in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = folder / "settings.toml"
    settings.write_text(SETTINGS.format(folder=folder))
    return settings
