"""Test and measure this project on one GPU within ten minutes.

    nox -s gpu, or python benchmarks/gpu.py [pytest's arguments]        run the tests marked `gpu`
    nox -s gpu -- --bench [--json gpu.json] [--minutes 9] [--only WORD] [--fresh] [--short]
    nox -s gpu -- --help

Needs torch and the packages in locks/gpu.md, but neither nox, vLLM nor a network. Each group of measurements runs in
its own process, so a failure does not affect other groups. Each result is written at once, and a second start measures
the rest. --short uses tiny sizes in this process, also on a CPU. benchmarks/README.md describes the measurements.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(path) for kind in ("packages", "apps") for path in sorted(ROOT.glob(f"{kind}/*/src"))]
BENCHMARKS = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]
sys.path += [path for path in (*BENCHMARKS, *SOURCES) if path not in sys.path]

try:  # in a checkout without installed packages
    from _children import LOCAL, Talker
    from _gpu_plan import Group, measurable, plan_of, shape_of
    from _gpu_policy import Policies, fitted
    from _gpu_report import Report, table
    from _learner_summary import peak_bf16_flops
except ImportError as error:
    raise SystemExit(f"error: {error}; locks/gpu.md says what this Python needs") from None

SIDE = ROOT / "benchmarks" / "peers" / "gpu_side.py"
ABOUT_S = 120.0
ROW_S = 150.0
"""Maximum wait for one measurement, so that a hanging one leaves time for the others."""
CLOSE_S = 15.0
"""Maximum wait for a process to end after its last measurement."""
TEST_S = 150
"""Maximum time of a test; then it is ended and prints its stack."""
_CACHE = Path(tempfile.gettempdir()) / f"rl-gpu-{os.getuid()}"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": str(_CACHE / "inductor"), "TRITON_CACHE_DIR": str(_CACHE / "triton")}
"""Default folder for compiled code; torch's default needs the user's name, which a container may lack."""
FEW_FRAGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Variables that reduce fragmentation on a full GPU; other processes may not be able to open such memory."""
OWN_WORDS = {"--bench", "--short", "--quick", "--help", "-h"}
"""Options without which the tests run, with all arguments passed to pytest."""
Tell = Callable[[Mapping[str, Any]], None]


def main(words: Sequence[str]) -> int:
    """Run the tests, or measure; return 0 if nothing failed."""
    if not OWN_WORDS & set(words):
        return run_tests(words)
    options = parse(words)
    if not options.short:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child as Ctrl-C does
    ends_at = time.monotonic() + 60 * options.minutes
    try:
        machine = Machine.of_this(options)
        is_anew = options.fresh and not options.only
        report = Report(options.json, machine.told(is_short=options.short), is_fresh=is_anew)
    except (ValueError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    bench = Bench(machine=machine, report=report, is_short=options.short, ends_at=ends_at, policies=Policies())
    groups = plan_of(is_short=options.short, only=tuple(options.only))
    if options.fresh:
        report.forget(groups)
    groups, skipped = measurable(groups, memory_bytes=machine.about["memory_bytes"], is_short=options.short)
    try:
        for group in groups:
            if bench.left_s > group.least_s:
                bench.run(group)
    except KeyboardInterrupt:
        say("\ninterrupted; start again to go on")
    finally:
        bench.policies.close()
        report.finish(groups, skipped)
    print("\n".join(table(report.content)))
    say(f"written to {options.json}")
    return 1 if report.content["failures"] else 0


def run_tests(words: Sequence[str]) -> int:
    """Run the tests marked `gpu` in this Python."""
    lacking = [name for name in ("torch", "pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if lacking:
        sys.stderr.write(f"error: this Python lacks {', '.join(lacking)}; locks/gpu.md says how to install them\n")
        return 2
    env = environment(OMP_NUM_THREADS="1")
    return subprocess.run(pytest_command(words), cwd=ROOT, env=env, check=False).returncode


def pytest_command(words: Sequence[str]) -> list[str]:
    """Return the named files, else all with such tests; a file that cannot be imported does not stop others."""
    files = [] if any((ROOT / word.split("::")[0]).exists() for word in words) else gpu_tests()
    told = ["-v", "--durations=15", "--continue-on-collection-errors", "-o", f"faulthandler_timeout={TEST_S}"]
    return [sys.executable, "-m", "pytest", "-m", "gpu", *told, *words, *files]


def gpu_tests() -> list[str]:
    """Return files with such tests; others may import missing packages, which would stop pytest."""
    files = [file for place in ("packages", "apps", "tests") for file in sorted((ROOT / place).rglob("test_*.py"))]
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text()]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    rest = "Without --bench or --short, the tests marked gpu run, and all arguments go to pytest."
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=about, epilog=rest)
    parser.add_argument("--bench", action="store_true", help="measure")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="results; an existing file is resumed")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long (default: 9)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="groups with this in their name")
    parser.add_argument("--fresh", action="store_true", help="measure again; with --only, those groups")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of a GPU that is not known by name")
    parser.add_argument("--short", "--quick", action="store_true", help="check that it runs: tiny sizes, also on a CPU")
    options = parser.parse_args(words)
    options.json = options.json.absolute()
    if not options.json.parent.is_dir() or options.minutes <= 0:
        parser.error(f"--json needs a folder that exists, and --minutes a number above 0; found {' '.join(words)}")
    if not plan_of(is_short=options.short, only=tuple(options.only)):
        names = ", ".join(dict.fromkeys(group.name for group in plan_of(is_short=options.short)))
        parser.error(f"--only must be a part of one of {names}; found {', '.join(options.only)}")
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and its torch.

    Attributes:
        about: Torch's description of it.
        peak_flops: Dense bfloat16 peak of the GPU; None if unknown.
        variables: `FEW_FRAGMENTS` if torch supports it here, else empty.
    """

    about: dict[str, Any]
    peak_flops: float | None
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_this(cls, options: argparse.Namespace) -> "Machine":
        """Query torch in a separate process, because this one must not hold GPU memory.

        Raises:
            ValueError: Torch is missing, or sees no GPU.
        """
        if importlib.util.find_spec("torch") is None:
            raise ValueError("torch is not installed in this Python; locks/gpu.md says what to install.")
        variables: Mapping[str, str] = {}
        if options.short:
            from gpu_side import about_machine

            about = about_machine()
        else:
            about, variables = asked_about()
        peak = peak_bf16_flops(about["device"]) if options.peak_tflops is None else options.peak_tflops * 1e12
        if peak is None and not options.short:
            say(f"the peak of {about['device']} is not known, so there is no MFU; give it with --peak-tflops")
        return cls(about=about, peak_flops=peak, variables=variables)

    def told(self, *, is_short: bool) -> dict[str, Any]:
        """Return the machine's part of the report."""
        return {
            "device": self.about["device"],
            "torch": self.about["torch"],
            "sources": sources_digest(),
            "is_quick": is_short,
            "date": time.strftime("%Y-%m-%d"),
            "environment": {
                **self.about,
                "peak_flops": self.peak_flops,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Runs groups one after the other.

    Attributes:
        machine: The machine.
        report: Receives the results.
        is_short: Tiny sizes, in this process.
        ends_at: Deadline of everything, on the clock of `time.monotonic`.
        policies: Folders of weights.
        side: Program that measures a group.
    """

    machine: Machine
    report: Report
    is_short: bool
    ends_at: float
    policies: Policies
    side: Path = SIDE

    @property
    def left_s(self) -> float:
        """Remaining seconds."""
        return self.ends_at - time.monotonic()

    def run(self, group: Group) -> None:
        """Make a group's missing measurements; one that ends its process does not affect the others."""
        rows = [row for row in group.rows if f"{group.name}/{row}" not in self.report.done]
        if not rows:
            return
        say(f"{time.strftime('%H:%M:%S')}  {group.name}: {', '.join(rows)}; {self.left_s:.0f} s left")
        try:
            job = self._job(group)
        except OSError as error:
            for row in rows:
                self.report.add(group, {"row": row, "error": str(error)})
            return
        told: set[str] = set()

        def tell(said: Mapping[str, Any]) -> None:
            if len(said) > 1:
                told.add(said["row"])
                self.report.add(group, said)

        while rows and self.left_s > 0:
            self._measure({**job, "rows": rows}, tell, name=group.name)
            if not told.intersection(rows):
                return
            rows = [row for row in rows if row not in told]

    def _job(self, group: Group) -> dict[str, Any]:
        shape = shape_of(group.shape, is_short=self.is_short) if group.shape else {}
        config = fitted(shape, memory_bytes=self.machine.about["memory_bytes"]) if shape else {}
        return {
            "kind": group.kind,
            "config": config,
            "policy": str(self.policies.folder(config)) if config else "",
            "is_short": self.is_short,
            "peak_flops": self.machine.peak_flops,
        }

    def _measure(self, job: dict[str, Any], tell: Tell, *, name: str) -> None:
        if self.is_short:
            from gpu_side import Job, run_group

            run_group(Job(**{**job, "rows": tuple(job["rows"])}), tell)
            return
        logs = self.report.file.with_name(f"{self.report.file.stem}-logs")
        logs.mkdir(exist_ok=True)
        variables = {} if job["kind"] == "weights" else self.machine.variables
        command = [sys.executable, str(self.side)]
        child = Child(command, job, log=logs / f"{name}.log", folder=logs, variables=variables)
        try:
            child.listen(tell, until=self.ends_at)
        finally:
            child.stop()


class Child:
    """A process that measures a group."""

    def __init__(
        self, program: Sequence[str], job: dict[str, Any], *, log: Path, folder: Path, variables: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            program: Interpreter and program, which gets the path of the job's file.
            job: Measurements to make.
            log: File to which its output is appended.
            folder: Folder for the job's file.
            variables: Environment variables beside those of every child.
        """
        self._log, self._row, self._last = log, job["rows"][0], job["rows"][-1]
        self._is_answered = False
        file = folder / f"{log.stem}.job.json"
        file.write_text(json.dumps(job))
        with log.open("a") as output:
            command = [*program, str(file)]
            self._talker = Talker(command, output, env=environment(**variables), stdin=subprocess.DEVNULL)

    def listen(self, tell: Tell, *, until: float) -> None:
        """Pass on its results; a row that kills it or takes too long is reported as an error.

        After its last row it may hang while CUDA shuts down, which is not an error.
        """
        while True:
            most_s = CLOSE_S if self._is_answered and self._row == self._last else ROW_S
            wait_s = min(most_s, until - time.monotonic())
            try:
                line = self._talker.line(max(0.0, wait_s))
            except queue.Empty:
                if wait_s >= most_s and not self._is_answered:
                    tell({"row": self._row, "error": f"no answer within {most_s:g} s; {self._last_words()}"})
                return  # otherwise the time is over before the row was reached
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its output
                    self._talker.process.wait(CLOSE_S)
                status = self._talker.process.returncode
                if status != 0 and not self._is_answered:
                    how = "did not end" if status is None else f"ended with {exit_text(status)}"
                    tell({"row": self._row, "error": f"its process {how}; {self._last_words()}"})
                return
            said = json.loads(line)
            self._row, self._is_answered = said["row"], len(said) > 1
            tell(said)

    def stop(self) -> None:
        """Kill the process and its group."""
        self._talker.kill()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-2:]
        return f"{self._log} ends with: {' | '.join(lines)[:400]}"


def exit_text(status: int) -> str:
    """Return an exit status as text, such as "status 1" or "signal 9"."""
    return f"signal {-status}" if status < 0 else f"status {status}"


def asked_about() -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return torch's description of the machine, and `FEW_FRAGMENTS` if torch supports them.

    Raises:
        ValueError: There is no GPU, or torch fails.
    """
    command = [sys.executable, str(SIDE), "--about"]
    for variables in (FEW_FRAGMENTS, {}):
        env = environment(**variables)
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=ABOUT_S, check=False)
        if not done.returncode:
            break
    else:
        raise ValueError(f"torch cannot use the GPU; {' '.join(command)} says:\n{done.stderr[-2000:]}")
    about = json.loads(done.stdout)
    if about["device"] == "cpu":
        raise ValueError("torch sees no GPU (nvidia-smi shows those that are there); --short runs on a CPU.")
    return about, variables


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a child, with this program's import path."""
    paths = [*BENCHMARKS, *SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**CACHES, **os.environ, **LOCAL, "PYTHONPATH": os.pathsep.join(paths), **variables}


def sources_digest() -> str:
    """Return the versions of the sources and packages; a GPU machine may have a copy without git's history."""
    digest = hashlib.sha256()
    for folder in (ROOT / "benchmarks", *map(Path, SOURCES)):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
