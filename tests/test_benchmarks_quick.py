"""A quick run of every benchmark without accounts or environment variables, and the content of its report."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import BENCHMARKS

KEPT = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
"""Variables that select this Python and these sources, and those without which no process has a warm start."""
KEYS = {
    "async": "bound_s date environment is_realtime roles rounds verdicts",
    "distillation": "comparison date device environment preset rounds sizes threads",
    "gateway": "comparisons date environment is_streamed memory model placement rounds scripted skipped targets turns "
    "versions",
    "learner": "comparisons date environment experts micro_batch_tokens optimizer policy preset rounds",
    "lora": "agreement comparisons date environment policy rank rounds threads versions",
    "metrics": "date environment step_ms targets",
    "rollout": "comparisons date environment preset rounds skipped threads versions",
    "service": "date environment model rounds",
    "skip_cache": "comparisons date environment flushes payload rounds skipped targets",
    "transfer": "environment failures memcpy_mb_per_s memcpy_mb_per_s_median payload peak_memory skipped targets",
    "trl": "comparisons machine pairs response_lengths skipped warm_up_steps",
}
"""Additional keys of each benchmark's report."""
ROW_KEYS = {
    "async": "mode wall_s step_s idle_learner slept_learner idle_engine slots_used staleness_mean steps rounds",
    "distillation": "system workload tokens_per_s peak_memory_mb start_memory_mb step_s losses",
    "gateway": "system workload tokens_per_s turn_overhead_p50_ms turn_overhead_p99_ms",
    "learner": "system workload tokens_per_s peak_memory_mb start_memory_mb tokens_per_s_best step_s fill "
    "model_flops_per_s mfu device threads versions losses grad_norms",
    "lora": "system workload step_s peak_memory_mb update_ms update_mb processor_s tokens_per_s proven_ms losses",
    "metrics": "system workload per_step_ms share_of_step",
    "rollout": "system workload tokens_per_s wall_s",
    "service": "workload median low high wanted is_met",
    "skip_cache": "system operation mb_per_s size_mb mb_per_s_quartiles mb_per_s_best wall_s",
    "transfer": "system operation mb_per_s mb_per_s_median samples_per_s p50_ms p99_ms",
    "trl": "system workload samples_per_s step_s_median samples_per_s_runs samples_per_s_spread part_s_median "
    "response_tokens_mean response_tokens_max reward_curve wall_s_runs load_before_runs versions",
}
"""Keys of each row of the results."""
Report = dict[str, Any]


def rows_of(report: Report, *names: str) -> dict[Any, Report]:
    """Index the rows by these columns, which must identify each row."""
    found = {tuple(row[name] for name in names): row for row in report["results"]}
    assert len(found) == len(report["results"])
    return found


def check_async(report: Report, said: str) -> None:
    rows = rows_of(report, "mode")
    sync, other = rows["sync",], rows["async",]
    assert len(rows) == 2
    for row in rows.values():
        assert row["wall_s"] > 0
        assert 0 <= row["idle_learner"] < 1 - row["slept_learner"] + 1e-6
        assert 0 <= row["idle_engine"] < 1
    assert (sync["steps"], other["steps"]) == (1, 4)
    assert sync["staleness_mean"] == 0 < other["staleness_mean"] <= 4
    assert 0 < report["bound_s"] < other["wall_s"]
    assert [one["what"] for one in report["verdicts"]] == ["speed", "idle_learner", "share_of_bound"]
    assert "targets" in said


def check_distillation(report: Report, _: str) -> None:
    assert [row["system"] for row in report["results"]] == ["ours", "full_softmax"]
    assert all(row["tokens_per_s"] > 0 for row in report["results"])
    assert all(row["peak_memory_mb"] >= 0 for row in report["results"])  # few tokens may need no further memory
    assert report["comparison"]["do_agree"]


def check_gateway(report: Report, said: str) -> None:
    (row,) = report["results"]
    assert row.keys() == set(ROW_KEYS["gateway"].split())
    assert (row["system"], row["workload"]) == ("ours", "chat_64")
    assert 0 < row["turn_overhead_p50_ms"] <= row["turn_overhead_p99_ms"] < report["turns"][0]["turn_p99_ms"]
    assert row["tokens_per_s"] > 0
    assert report["memory"]["token_kb_per_session"] > 0
    assert [of["is_met"] for of in report["targets"]] == [None] * 4
    assert said.count(": not judged\n") == 4
    assert report["skipped"].keys() == {"vllm_server"}


def check_learner(report: Report, _: str) -> None:
    rows = rows_of(report, "system", "workload")
    sides, shared = ("ours", "transformers", "ours_class"), ("shared_256_8", "shared_512_16", "trees")
    expected = {(side, kind) for side in sides for kind in ("equal", "ragged", *shared)}
    assert rows.keys() == expected | {("ours_unshared", kind) for kind in shared}
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert row["peak_memory_mb"] > row["start_memory_mb"] > 0
        assert len(set(row["losses"])) == 2  # a warm-up and a round, each on its own batch
    fills = {key: row["fill"] for key, row in rows.items()}
    assert fills["ours", "ragged"] == fills["transformers", "equal"] == 1.0 > fills["transformers", "ragged"]
    assert all(fills["ours", kind] > 1.5 > 1.0 == fills["ours_unshared", kind] for kind in shared)
    compared = {(of["system"], of["peer"]) for of in report["comparisons"]}
    assert compared == {
        *(("ours", other) for other in ("transformers", "ours_unshared")),
        *(("ours_class", other) for other in ("transformers", "ours")),
    }
    (experts,) = report["experts"]
    assert {"ours", "in_turn_mkl", "grouped"} <= experts["ways"].keys()
    assert experts["best_other"] in experts["ways"].keys() - {"ours"}
    assert experts["ratio"] > 0
    assert all(max(of["largest_relative_difference"].values()) < 1e-4 for of in report["comparisons"])


def check_lora(report: Report, said: str) -> None:
    rows = rows_of(report, "system", "workload")
    trained = {(system, kind) for system in ("ours", "ours_full", "peft") for kind in ("train", "train_recompute")}
    assert rows.keys() == trained | {(system, "decode") for system in ("ours", "ours_merged", "ours_full")}
    assert all(row["step_s"] > 0 and row["peak_memory_mb"] > 0 for row in rows.values())
    assert all(len(set(rows[key]["losses"])) == 2 for key in trained)  # a warm-up and a round, each on its own batch
    assert 0 < rows["ours", "train"]["update_mb"] < rows["ours_full", "train"]["update_mb"]
    assert 0 < rows["ours", "decode"]["update_ms"] <= rows["ours", "decode"]["proven_ms"]
    assert rows["peft", "train"]["update_ms"] is None
    assert report["agreement"].keys() == {"train", "train_recompute"}
    assert {of["is_met"] for of in report["comparisons"]} == {None}
    assert said.count(": not judged\n") == 9


def check_metrics(report: Report, _: str) -> None:
    rows = rows_of(report, "system", "workload")
    main_jobs = [("ours", "main_job"), ("ours", "main_job_all_trackers")]
    assert list(rows) == [*main_jobs, ("ours", "validation_100k"), ("ours", "report_50k")]
    assert all(row["per_step_ms"] > 0 and row["share_of_step"] > 0 for row in rows.values())
    for key in main_jobs:
        assert report["step_ms"][key[1]] > 0
        assert rows[key]["num_metrics"] > 50
        assert rows[key]["parts_ms"]["Fanout.log"] > 0
        assert min(rows[key][name] for name in ("closing_s", "probes_ms", "children_cpu_s")) > 0
    threads = [rows[key]["parts_ms"]["trackers' threads"] for key in main_jobs]
    assert threads[0] < threads[1]
    assert rows["ours", "report_50k"]["size_mb"] > 0
    assert len(report["targets"]) == 3


def check_rollout(report: Report, said: str) -> None:
    rows = rows_of(report, "system", "workload")
    generated = {(system, "ragged") for system in ("ours", "transformers")}
    assert rows.keys() == generated | {("ours", "weight_update"), ("copy", "weight_update")}
    assert all(row["wall_s"] > 0 for row in rows.values())
    assert all(rows[key]["tokens_per_s"] > 0 for key in generated)
    compared = {(of["workload"], of["peer"]) for of in report["comparisons"]}
    assert compared == {("ragged", "transformers"), ("weight_update", "copy")}
    assert report["skipped"].keys() == {"vllm"}
    assert "targets" in said


def check_service(report: Report, said: str) -> None:
    rows = rows_of(report, "workload")
    assert {name for (name,) in rows} == {
        *("overhead", "training_ratio", "sampling_ratio", "first_token_ms", "slot_ms", "beyond_slot_ms")
    }
    for row in rows.values():
        assert row["low"] <= row["median"] <= row["high"]
        assert (row["is_met"] is None) == (row["wanted"] is None)
    assert "beyond_slot_ms" in said


def check_skip_cache(report: Report, said: str) -> None:
    systems = ("ours", "ours_compressed", "torch_rows", "torch_padded")
    expected = [(system, operation) for system in systems for operation in ("write", "read")]
    assert list(rows_of(report, "system", "operation")) == expected
    assert all(row["mb_per_s"] > 0 and row["size_mb"] > 0 for row in report["results"])
    assert report["skipped"].keys() == {"verl"}
    assert {claim["target"] for claim in report["targets"]} > {"ours read, MB/s"}
    assert {claim["is_met"] for claim in report["targets"]} == {None}  # too few samples to judge the targets
    assert said.count(": not judged, too few samples\n") == len(report["targets"])
    assert ": missed" not in said
    assert "verl was left out" in said


def check_transfer(report: Report, _: str) -> None:
    rows = rows_of(report, "system", "operation")
    operations = ("put", "get", "small_put", "small_get", "lease_10k", "lease_1m", "ack", "small_ack")
    assert list(rows) == [(system, operation) for system in ("memory", "shm") for operation in operations]
    assert all(row["samples_per_s"] > 0 for row in rows.values())
    assert all((row["mb_per_s"] or row["p50_ms"]) > 0 for row in rows.values())
    assert all(held["peak_bytes"] > 0 for held in report["peak_memory"].values())
    assert report["skipped"].keys() == {"ray", "transferqueue", "plain_ray"}
    assert not report["failures"]


def check_trl(report: Report, _: str) -> None:
    ((key, row),) = rows_of(report, "system", "workload").items()
    assert key == ("ours", "short")
    assert row["samples_per_s"] > 0
    assert row["part_s_median"].keys() == {"generate", "advantages", "update", "publish_and_prove"}
    assert min(row["part_s_median"].values()) > 0
    assert 0 < row["response_tokens_mean"] <= row["response_tokens_max"] <= 8
    assert len(row["reward_curve"]) == 4
    assert all(0 <= reward <= 1 for reward in row["reward_curve"])
    assert report["skipped"].keys() == {"trl"}


CHECKS: dict[str, Callable[[Report, str], None]] = {
    "async": check_async,
    "distillation": check_distillation,
    "gateway": check_gateway,
    "learner": check_learner,
    "lora": check_lora,
    "metrics": check_metrics,
    "rollout": check_rollout,
    "service": check_service,
    "skip_cache": check_skip_cache,
    "transfer": check_transfer,
    "trl": check_trl,
}


def test_every_benchmark_has_its_check() -> None:
    own_test = {"gpu"}  # tests/test_gpu_kit.py
    found = {path.stem for path in BENCHMARKS.glob("[!_]*.py")} - own_test
    assert CHECKS.keys() == found == KEYS.keys() == ROW_KEYS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_a_quick_run_needs_nothing_and_reports_what_a_full_one_does(name: str, tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "out.json"
    home.mkdir()
    env = {variable: os.environ[variable] for variable in KEPT if variable in os.environ}
    words = ["--folder", str(home)] if name == "skip_cache" else []
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", str(file), *words]
    done = subprocess.run(
        command, cwd=home, env=env | {"HOME": str(home)}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report.keys() == {"benchmark", "is_quick", "results", *KEYS[name].split()}
    assert (report["benchmark"], report["is_quick"]) == (name.replace("_", "-"), True)
    assert report["results"]
    assert all(row.keys() >= set(ROW_KEYS[name].split()) for row in report["results"])
    assert set(report.get("skipped", {}).values()) <= {"left out by --quick"}
    CHECKS[name](report, done.stdout)
    left = {str(path.relative_to(home)) for path in home.rglob("*")}
    assert [name for name in left if name != ".cache" and not name.startswith(".cache/rl-")] == []  # file trials
