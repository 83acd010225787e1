"""Speed metrics of a step."""

import json

import numpy as np
import pytest

from rl_core import Batch, Trajectory
from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.architecture.tensor_shapes import forward_flops
from rl_metrics.definitions.table import DEFINITIONS
from rl_trainer_parts.reporting.step_metrics import with_speeds
from rl_trainer_parts.settings.schema import Settings

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

TIMES = {"timing_s/update_actor": 2.0, "timing_s/old_log_prob": 0.5, "perf/total_num_tokens": 10.0}


def settings_of(tmp_path, **changed):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return Settings(policy={"path": tmp_path}, prompts={"train": tmp_path / "train.jsonl"}, **changed)


def batch_of(*lengths):
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt_uid=f"p{row}",
                session_index=0,
                input_ids=np.zeros(length, dtype=np.int32),
                loss_mask=np.ones(length, dtype=np.bool_),
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                policy_versions=np.zeros(length, dtype=np.int32),
            )
            for row, length in enumerate(lengths)
        ]
    )


def test_without_a_peak_there_is_no_share_of_it(tmp_path):
    found = with_speeds(settings_of(tmp_path), TIMES, batch_of(4, 6))
    assert found == {
        **TIMES,
        "timing_per_token_ms/update_actor": 200.0,
        "timing_per_token_ms/old_log_prob": 50.0,
    }


def test_the_share_of_the_peak_of_all_devices(tmp_path):
    settings = settings_of(tmp_path, metrics={"peak_tflops": 1e-6}, trainer={"epochs": 2}, parallel={"ranks": 4})
    found = with_speeds(settings, TIMES | {"timing_s/update_critic": 1.0}, batch_of(4, 6))
    config = parse_policy_config(CONFIG)
    forward, peak = forward_flops(config, [4, 6]), 1e-6 * 1e12 * 4
    assert found["perf/mfu/actor"] == pytest.approx(2 * 3 * forward / 2.0 / peak)
    assert found["perf/mfu/actor_infer"] == pytest.approx(forward / 0.5 / peak)
    without_head = forward_flops(config, [4, 6], has_head=False)
    assert found["perf/mfu/critic"] == pytest.approx(2 * 3 * without_head / 1.0 / peak)
    assert "perf/mfu/ref" not in found
    for name in found:
        DEFINITIONS.lookup(name)
