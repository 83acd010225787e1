"""Kills, stops, clock jumps and full disks: sync results are unchanged, and async prompts train once."""

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
from async_faults import ROLES, assert_trained_exactly_once, num_record_lines, pid_of, start_scripted
from chaos import Chaos, Clock, small_disk
from chaos_driver import PHASES, VARIABLE
from run_equality import differing_metrics, learnt, summary
from tiny_run import PROMPTS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here
from train_process import TrainProcess

DISK_MIB = 64
TICK_S = 0.005
LONGEST_WAIT_S = 20.0
"""Maximum wait for a point that an ending or restarting run may never reach."""
END_S = 600.0
Fault = tuple[str, str]
EACH_ROLE: list[Fault] = [*(("kill", role) for role in ROLES), ("stop", "learner"), ("clock", "main")]
IN_TURNS: list[Fault] = [("kill", "main"), ("stop", "main"), ("clock", "main"), ("kill", "main")]
LOCKS = Path("/dev/shm")


class TrainerUnderFaults:
    """A trainer under injected faults, restarted until it finishes."""

    def __init__(
        self,
        chaos: Chaos,
        *,
        start: Callable[[], TrainProcess],
        victims: Callable[[TrainProcess], Mapping[str, int]],
        wait_for_point: Callable[[TrainProcess], str],
        deck: Sequence[Fault] = (),
    ) -> None:
        """Inject nothing yet.

        Args:
            chaos: Draws and injects the faults.
            start: Starts or resumes the trainer.
            victims: Returns its processes by name; "main" is the process that `start` returned.
            wait_for_point: Waits for the point of the next fault; returns a description of it.
            deck: Kind and victim of each fault, shuffled before use. If empty, faults are drawn at random.
        """
        self._deck = chaos.draw.sample(deck, len(deck))
        self._chaos, self._start, self._victims, self._wait_for_point = chaos, start, victims, wait_for_point
        self._shared: set[Path] = set()
        self.num_starts = 0
        self.num_left = 0

    def run(self, *, num_faults: int) -> None:
        """Inject faults until there are `num_faults` in all or the run finishes; then let it finish."""
        while True:
            process = self._start()
            self.num_starts += 1
            try:
                may_fail = self._disturb(process, num_faults=num_faults)
                self._chaos.end_all()
                status = process.wait(END_S)
                left = process.leftovers()
                self.num_left += len(left)
                assert status == 0 or may_fail, f"{self.where}: it ended with {status}:\n{process.text}"
                assert left == [], f"{self.where}: {left}"
            finally:
                process.end()
            if status == 0:
                break
        shared = [path for path in self._shared if path.exists()]
        self.num_left += len(shared)
        assert shared == [], f"{self.where}: {shared}"

    @property
    def where(self) -> str:
        """The seed and the faults so far, which reproduce a failure."""
        return f"seed {self._chaos.seed}, faults {self._chaos.faults}"

    def _disturb(self, process: TrainProcess, *, num_faults: int) -> bool:
        """Inject faults while the trainer runs; return True if they may end it early."""
        may_fail = False
        while process.status is None and len(self._chaos.faults) < num_faults:
            place = self._wait_for_point(process)
            if process.status is not None:
                break
            victims = self._victims(process)
            self._shared |= {folder for pid in victims.values() for folder in queue_folders(pid)}
            if self._deck:
                kind, name = self._deck[-1]
                if name not in victims:
                    continue  # it is starting
                self._deck.pop()
            else:
                kind, name = self._chaos.draw_kind(), self._chaos.draw.choice(sorted(victims))
            if kind in ("clock", "disk"):
                self._chaos.make(kind, victim=place)
            else:
                self._chaos.make(kind, victims[name], f"{name} {place}".strip())
            may_fail |= kind == "disk" or (kind == "kill" and name == "main")
        return may_fail

    def books(self) -> str:
        """Return a summary of the faults in one line."""
        chaos = self._chaos
        return (
            f"seed {chaos.seed}: {len(chaos.faults)} faults {chaos.counts}, started {self.num_starts} times, "
            f"{self.num_left} processes or folders of shared memory left"
        )


def queue_folders(pid: int) -> set[Path]:
    """Return the shared-memory folders in which a process has files open."""
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = link.readlink()
            if target.is_relative_to(LOCKS) and target.parent != LOCKS:
                found.add(LOCKS / target.relative_to(LOCKS).parts[0])
    except OSError:  # the process has just ended
        pass
    return found


def wait_for(process: TrainProcess, condition: Callable[[], bool], *, longest_s: float) -> None:
    """Wait until the condition holds, the process ends, or `longest_s` seconds pass."""
    ends_at = monotonic() + longest_s
    while process.status is None and not condition() and monotonic() < ends_at:
        signal.sigtimedwait([], TICK_S)


@contextmanager
def chaotic(seed: int, run: TinyRun) -> Iterator[Chaos]:
    """Yield the faults of a run, whose folder is on a small disk if one can be mounted."""
    clock = Clock(run.folder / "clock")
    with small_disk(run.folder / "runs", size_mib=DISK_MIB) as disk:
        chaos = Chaos(seed, clock=clock, disk=disk)
        try:
            yield chaos
        finally:
            chaos.end_all()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Return a finished synchronous run without faults."""
    run = make_tiny_run(tmp_path_factory.mktemp("undisturbed"))
    assert train_here(run, trainer__checkpoint_every=1) == 0
    return run


@pytest.fixture
def run(undisturbed: TinyRun, tmp_path: Path) -> TinyRun:
    """Return the inputs of the same run in a new folder."""
    return copy_tiny_run(undisturbed, tmp_path / "run")


def chaos_async(run: TinyRun, seed: int, *, num_faults: int, deck: Sequence[Fault] = ()) -> str:
    """Inject faults into the processes of an asynchronous run; return a summary."""
    steps = 2 * num_faults
    with chaotic(seed, run) as chaos:

        def start() -> TrainProcess:
            words = ["--resume"] if (run.run_folder / "settings.toml").exists() else []
            return start_scripted(run, *words, environment=chaos.clock.environment, trainer__steps=steps)

        def victims(process: TrainProcess) -> dict[str, int]:
            children = process.children()
            found = {role: pid_of(run, role) for role in ROLES}
            return {"main": process.pid, **{role: pid for role, pid in found.items() if pid and pid in children}}

        def wait_for_point(process: TrainProcess) -> str:
            lines = num_record_lines(run) + chaos.draw.randint(1, 12)
            longest_s = chaos.draw.uniform(0.0, 3.0) if chaos.draw.randrange(2) else LONGEST_WAIT_S
            wait_for(process, lambda: num_record_lines(run) >= lines, longest_s=longest_s)
            return ""

        trainer = TrainerUnderFaults(chaos, start=start, victims=victims, wait_for_point=wait_for_point, deck=deck)
        trainer.run(num_faults=num_faults)
        assert_trained_exactly_once(run, steps=steps, misses_metrics=chaos.disk is not None)
        return f"async, {trainer.books()}; {PROMPTS_PER_STEP * steps} prompts trained once each in {steps} steps"


def chaos_sync(run: TinyRun, undisturbed: TinyRun, seed: int, *, num_faults: int, deck: Sequence[Fault] = ()) -> str:
    """Inject `num_faults` faults in random phases of consecutive synchronous runs; return a summary."""
    phases = run.folder / "phases"
    num_runs = len_at_start = 0
    with chaotic(seed, run) as chaos:
        environment = {**chaos.clock.environment, VARIABLE: str(phases)}

        def start() -> TrainProcess:
            nonlocal len_at_start
            len_at_start = len(seen())
            words = ["--resume"] if (run.run_folder / "settings.toml").exists() else []
            placement = chaos.draw.choice(["inline", "process"])
            restarts = {"replicas__restarts": num_faults} if placement == "process" else {}  # all may hit the engine
            settings = run.train_words(*words, trainer__checkpoint_every=1, rollout__placement=placement, **restarts)
            output = run.folder / f"output-{len(list(run.folder.glob('output-*.txt')))}.txt"
            return TrainProcess(settings, output=output, environment=environment, module="chaos_driver")

        def victims(process: TrainProcess) -> dict[str, int]:
            return {"main": process.pid, **dict(zip(["engine"], process.children(), strict=False))}

        def seen() -> list[str]:
            return phases.read_text().splitlines() if phases.exists() else []

        def wait_for_point(process: TrainProcess) -> str:
            begun = seen()
            is_starting = len(begun) == len_at_start or begun[-1] == PHASES[0]
            wanted = chaos.draw.choice(PHASES if is_starting else PHASES[1:])
            if wanted == PHASES[0]:
                wait_for(process, lambda: len(seen()) > len_at_start, longest_s=LONGEST_WAIT_S)
            else:
                wait_for(process, lambda: wanted in seen()[len(begun) :], longest_s=LONGEST_WAIT_S)
            wait_for(process, lambda: False, longest_s=chaos.draw.uniform(0.0, 2.0 if wanted == PHASES[0] else 0.1))
            return f"in {(seen() or PHASES[:1])[-1]}"

        trainer = TrainerUnderFaults(chaos, start=start, victims=victims, wait_for_point=wait_for_point, deck=deck)
        while len(chaos.faults) < num_faults:
            shutil.rmtree(run.run_folder, ignore_errors=True)
            trainer.run(num_faults=num_faults)
            num_runs += 1
            assert learnt(run) == learnt(undisturbed), trainer.where
            assert summary(run) == summary(undisturbed), trainer.where
            if not any(kind == "disk" for kind, _ in chaos.faults):
                assert differing_metrics(run, undisturbed) == [], trainer.where
        return f"sync, {trainer.books()}; {num_runs} runs, each equal to the undisturbed one bit for bit"


def test_chaos_of_the_asynchronous_trainer(run: TinyRun, seed: int) -> None:
    print(chaos_async(run, seed, num_faults=len(EACH_ROLE), deck=EACH_ROLE))  # noqa: T201


def test_chaos_of_the_synchronous_trainer(run: TinyRun, undisturbed: TinyRun, seed: int) -> None:
    print(chaos_sync(run, undisturbed, seed, num_faults=len(IN_TURNS), deck=IN_TURNS))  # noqa: T201


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(10))
def test_long_chaos_of_the_asynchronous_trainer(run: TinyRun, seed: int, turn: int) -> None:
    print(chaos_async(run, seed + turn, num_faults=15))  # noqa: T201


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(10))
def test_long_chaos_of_the_synchronous_trainer(run: TinyRun, undisturbed: TinyRun, seed: int, turn: int) -> None:
    print(chaos_sync(run, undisturbed, seed + turn, num_faults=10))  # noqa: T201
