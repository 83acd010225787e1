"""Run a trainer's real command on recording fakes, and describe everything it built, did and printed."""

import asyncio
import contextlib
import functools
import io
import json
import re
import shutil
import sys
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import recorded_fakes as fakes
from recorded_fakes import Trace

from rl_core.files.array_entries import SUFFIX
from rl_rollout.loops import LOOPS
from rl_rollout.prompts import PromptTokenizer

MEASURED = re.compile(
    r"tim(e|ing)|_s\b|_s/|per_s|perf/|memory|idle|busy|wall|slowest|took|agent_loop/.*/|queue|size_gb|size_bytes"
)
"""Names of values that differ between equal runs."""

CONSTRUCTED = (
    "rl_async_trainer.liveness.watchdog:Watchdog",
    "rl_async_trainer.messages:ValidationBatch",
    "rl_core.weights.publish:ProofTolerances",
    "rl_distill.checkpoints.store:CheckpointStore",
    "rl_distill.learner_host:LearnerHostOptions",
    "rl_distill.skipping:SkippedUpdates",
    "rl_distill.teacher.protocol:TeacherPlan",
    "rl_distill.teacher.score_cache:ScoreKind",
    "rl_distill.teacher.service:TeacherServiceOptions",
    "rl_metrics.reductions.hardware:MemoryWatch",
    "rl_rollout.rewards.scorer:RewardScorer",
    "rl_rollout.rollouter.rollouter:RollouterOptions",
    "rl_rollout.schedule:ScheduleOptions",
)
"""Classes whose arguments matter only when something fails, or after a long time."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a command did.

    Attributes:
        entries: Facts in words, sorted.
        output: What it printed.
    """

    entries: tuple[str, ...]
    output: str


def record_command(
    trainer: str,
    words: list[str],
    *,
    run_folder: Path,
    is_supervised: bool = False,
    prepare: Callable[[], None] = lambda: None,
    keeps: bool = False,
) -> RecordedRun:
    """Run a command of a trainer in this process.

    Args:
        trainer: "sync", "async", or "sft" for the synchronous trainer's command of that name.
        words: The command and its arguments.
        run_folder: The run's folder, whose files are described and then removed.
        is_supervised: Run it as from a shell, with children that are killed at once.
        prepare: Called when the parent folder is empty.
        keeps: Keep the files.
    """
    trace = Trace()
    output = io.StringIO()
    shutil.rmtree(run_folder.parent, ignore_errors=True)
    prepare()
    with _recording(trace), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        app = "sync" if trainer == "sft" else trainer
        module = __import__(f"rl_{app}_trainer.main", fromlist=["main"])
        try:
            with mock.patch.object(sys, "argv", ["trainer", *words]):
                trace.add("status", module.main(None if is_supervised else words))
        except fakes.BuiltError:
            trace.add("status", 0)
        except Exception as error:  # a setting may be refused late
            trace.add("raised", type(error).__name__, str(error))
            output.write(traceback.format_exc())
    for entry in (*_files_of(run_folder), *_caches_beside(run_folder)):
        trace.add("file", entry)
    printed = output.getvalue()
    trace.entries += [f"printed {_without_times(line)}" for line in printed.splitlines()]
    if not keeps:
        shutil.rmtree(run_folder.parent, ignore_errors=True)
    tracemalloc.stop()
    return RecordedRun(entries=tuple(sorted(trace.entries)), output=printed)


def _without_times(line: str) -> str:
    """Return a line without what differs between equal runs."""
    if any(word in line for word in ("wall_s", "samples_per_s", "tok/s", "s/step", "eta")):
        return re.sub(r"\d[\d.]*", "#", line)
    return re.sub(r"\d[\d.]* ?(ms|s|min|MiB|GiB)\b", "#", line)


def _files_of(folder: Path) -> Iterator[str]:
    """Describe a run's files, except its copy of the settings and measured values."""
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in ("settings.toml", "queue", "logs", "tensorboard"):
            yield f"{name} {path.stat().st_mode & 0o777:o}"
    for name in ("metrics", "events", "rollouts", "generations", "probes", "histograms"):
        path = folder / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.is_file() else ():
            row = json.loads(line)
            if row.get("event") != "slowest_session":
                yield f"{name} {_steady(row)}"
    for name in ("health.json", "summary.json"):
        if (folder / name).is_file():
            yield f"{name} {_steady(json.loads((folder / name).read_text()))}"


def _caches_beside(run_folder: Path) -> Iterator[str]:
    """Describe the files of caches, and how their arrays are stored."""
    for path in sorted(run_folder.parent.rglob("*")):
        name = re.sub(r"[0-9a-f]{16,}", "HASH", str(path.relative_to(run_folder.parent)))
        if path.is_file() and not name.startswith(run_folder.name):
            yield name
            if path.name.endswith(SUFFIX) and zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    for file in archive.namelist():
                        if file.endswith("/zarr.json"):
                            yield f"{name} {file} {json.loads(archive.read(file)).get('codecs')}"


def _steady(value: Any, name: str = "") -> Any:
    """Return JSON without measured values; their names stay."""
    if isinstance(value, Mapping):
        return {key: _steady(one, f"{name}/{key}") for key, one in value.items() if key not in ("time", "checks")}
    if MEASURED.search(name):
        return "measured"
    if isinstance(value, list):
        return [_steady(one, name) for one in value]
    return round(value, 5) if isinstance(value, float) else value


@contextlib.contextmanager
def _recording(trace: Trace) -> Iterator[None]:
    """Replace what would load models or start processes."""
    with contextlib.ExitStack() as stack:

        def patch(target: str, new: Any) -> None:
            stack.enter_context(mock.patch(target.replace(":", "."), new))

        def recorded(kind: type) -> Any:
            return type(kind.__name__, (kind,), {"trace": trace})

        engines = {name: type("Engine", (fakes.FakeEngine,), {"trace": trace, "name": name}) for name in _ENGINES}
        for module in (
            "rl_trainer_parts.rollouts.engines",
            "rl_rollout.engines.process",
            "rl_trainer_parts.checks.models",
        ):
            patch(f"{module}:engine_class", engines.__getitem__)
        patch("rl_async_trainer.roles.learner:engine_class", engines.__getitem__)
        for module in ("rl_rollout.engines.process", "rl_core.cluster.blocking", "rl_async_trainer.training_run"):
            patch(f"{module}:open_cluster", functools.partial(_inline_cluster, trace))
        patch("rl_async_trainer.training_run:start_ray", lambda options: trace.add("ray", options))
        patch("rl_async_trainer.training_run:RayQueue", _inline_queue)
        patch("rl_async_trainer.training_run:SharedMemoryQueue", _inline_queue)
        stack.enter_context(mock.patch.dict(LOOPS._builtin, {"two_parts": fakes.TwoParts}))
        patch("rl_trainer_parts.rollouts.inputs:PromptTokenizer.load", _loaded)
        _patch_learners(stack, recorded)
        _patch_transports(patch, trace)
        _patch_waits(patch, trace)
        _patch_reports(patch, trace)
        for target in CONSTRUCTED:
            _record_construction(stack, trace, target)
        yield


_ENGINES = ("vllm", "transformers")


_TOKENIZERS: dict[str, PromptTokenizer] = {}
_load = PromptTokenizer.load


def _loaded(folder: Path, **options: Any) -> PromptTokenizer:
    """Load a tokenizer once, since every run reads the same few."""
    key = f"{folder} {options}"
    if key not in _TOKENIZERS:
        _TOKENIZERS[key] = _load(folder, **options)
    return _TOKENIZERS[key]


def _inline_queue(tasks: Any, *, options: Any) -> Any:
    from rl_core import InProcessQueue

    return InProcessQueue(tasks, options=options)


def _inline_cluster(trace: Trace, options: Any = None) -> Any:
    """A cluster that records where roles would run, and runs them here."""
    from rl_core.cluster import Cluster, ClusterOptions
    from rl_core.cluster.local import LocalLauncher

    options = options or ClusterOptions()

    class Here(Cluster):
        async def start_group(self, spec: Any, *, size: int, pool: Any = None, deadline_s: float) -> Any:
            trace.add("role", spec.name, options, size, spec.restart, sorted(spec.environment), pool, deadline_s)
            own = replace(spec, environment={}, cpus=0.0, gpus=0.0)
            return await super().start_group(own, size=size, pool=None, deadline_s=deadline_s)

    return Here(LocalLauncher(ClusterOptions(kind="inline")))


def _patch_learners(stack: contextlib.ExitStack, recorded: Callable[[type], Any]) -> None:
    policy, reference, critic = map(recorded, (fakes.FakeModel, fakes.FakeReference, fakes.FakeCritic))
    modules = {
        "rl_distill.megatron": fakes.module_with("rl_distill.megatron"),
        "rl_distill.megatron.ranks": fakes.module_with("ranks", LearnerRanks=recorded(fakes.FakeRanks)),
        "rl_distill.megatron.learner": fakes.module_with(
            "learner", MegatronLearner=policy, MegatronCritic=critic, MegatronReference=reference
        ),
        "rl_distill.teacher.megatron_teacher": fakes.module_with(
            "megatron_teacher", MegatronPlace=dict, MegatronReplica=recorded(fakes.FakeTeacherReplica)
        ),
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)

    def restore() -> None:  # mock.patch.dict would also forget every module that is imported meanwhile
        for name, module in before.items():
            sys.modules.pop(name, None) if module is None else sys.modules.update({name: module})

    stack.callback(restore)


def _patch_transports(patch: Callable[[str, Any], None], trace: Trace) -> None:
    from rl_core.weights import SharedFileTransport

    def transport(kind: str) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            trace.add("transport", kind, arguments, options)
            return SharedFileTransport()

        return make

    for kind in ("IpcTransport", "BroadcastTransport", "DirectTransport"):
        patch(f"rl_trainer_parts.rollouts.setup:{kind}", transport(kind))


def _patch_waits(patch: Callable[[str, Any], None], trace: Trace) -> None:
    """Record how long the run is prepared to wait."""
    from rl_async_trainer.controller import controller
    from rl_core import InProcessQueue
    from rl_trainer_parts.run.stopping import StopSignal

    timeout, lease, stop_run, ask_roles = asyncio.timeout, InProcessQueue.lease, StopSignal.run, controller.ask_roles

    def timed(delay: float | None) -> Any:
        if delay is not None and delay == round(delay, 2):
            trace.add("timeout", delay)
        return timeout(delay)

    def leased(self: Any, task: str, **options: Any) -> Any:
        trace.add("lease", task, round(options.get("deadline_s") or 0.0, 1))
        return lease(self, task, **options)

    async def run(self: Any, work: Any, *, what: str, deadline_s: float) -> Any:
        trace.add("wait", what, deadline_s)
        return await stop_run(self, work, what=what, deadline_s=deadline_s)

    async def asked(*arguments: Any, deadline_s: float, **options: Any) -> None:
        trace.add("heartbeat", deadline_s)
        await ask_roles(*arguments, deadline_s=deadline_s, **options)

    patch("asyncio:timeout", timed)
    patch("rl_async_trainer.controller.controller:ask_roles", asked)
    patch("rl_core:InProcessQueue.lease", leased)
    patch("rl_trainer_parts.run.stopping:StopSignal.run", run)


def _patch_reports(patch: Callable[[str, Any], None], trace: Trace) -> None:
    """Record trackers, reports and supervised processes."""

    def killed(supervisor: Any) -> int:
        trace.add("process", supervisor._module)
        return -9

    patch("rl_async_trainer.supervisor:Supervisor._run_once", killed)

    class Tracker:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("config", None)
            options.pop("ending", None)
            trace.add("tracker", arguments[1:], options)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    for name in ("WandbTracker", "MlflowTracker", "TensorBoardTracker"):
        patch(f"rl_trainer_parts.reporting.trackers:{name}", Tracker)

    class Report:
        def __init__(self, folder: Path, *, every: int) -> None:
            trace.add("report", every)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    patch("rl_trainer_parts.reporting.trackers:ReportWriter", Report)


def _record_construction(stack: contextlib.ExitStack, trace: Trace, target: str) -> None:
    module, _, name = target.partition(":")
    __import__(module)
    kind = getattr(sys.modules[module], name)
    init = kind.__init__

    @functools.wraps(init)
    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        trace.add(name, arguments, options)
        init(self, *arguments, **options)

    stack.enter_context(mock.patch.object(kind, "__init__", recorded))
