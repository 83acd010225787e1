"""The command line: new, check-machine, check-model, train, validate, status, scale, simulate, export."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.terminal_text import counted, say
from rl_trainer_parts.commands.command_line import USAGE, read_settings, run_program, take_option, train_command

if TYPE_CHECKING:
    from rl_async_trainer.settings import AsyncSettings
    from rl_metrics.trackers import ConsoleTracker
    from rl_trainer_parts.rollouts.inputs import Inputs
    from rl_trainer_parts.run.folder import RunFolder

NAME = "rl-async-trainer"
TRAIN = """\
  train SETTINGS.toml [--resume] [--dry-run] [--best] [--replay RUN] [--section.name=value ...]
      Train. --resume continues the run in the folder; --dry-run checks everything, prints the plan and exits.
      --replay trains on the groups of a recorded run in the same steps, from its skip cache if it has one.
      policy.path may be a run, whose newest checkpoint is used; --best uses its best one."""
OTHERS = """\
  status RUN
      Show what a live run is doing: its roles, groups in flight and ready, and policy versions.
  scale RUN --engines N
      Add engines to a live run, or remove some.
  simulate [WORKLOAD.toml] [--gpus N,...] [--search] ...
      Simulate step times on a virtual clock: how to split GPUs between rollouts and training, and which staleness.
"""


STATUS_DEADLINE_S = 60.0
SCALE_DEADLINE_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    From the shell, `train` runs in a separate process that is restarted if it is killed; otherwise it runs in this
    process.
    """
    trains = train_supervised if arguments is None else train
    commands = {"train": trains, "status": status, "scale": scale, "simulate": simulate}
    usage = USAGE.format(program=NAME, train=TRAIN, others=OTHERS)
    return run_program(arguments, name=NAME, usage=usage, commands=commands, settings=_settings_class)


def _settings_class() -> "type[AsyncSettings]":
    from rl_async_trainer.settings import AsyncSettings

    return AsyncSettings


def train_supervised(words: list[str]) -> int:
    """`train` under a supervisor, unless this process already has one or a debugger needs to work in it."""
    from rl_async_trainer.supervisor import Supervisor, end_with_supervisor

    if end_with_supervisor():
        return train(words)
    of_settings = [word for word in words if word not in ("--resume", "--dry-run", "--best")]
    take_option(of_settings, "--replay")
    settings = read_settings(of_settings, _settings_class(), command=f"{NAME} train")
    if "--dry-run" in words or settings.roles.placement == "inline" or not settings.roles.controller_restarts:
        return train(words)
    return Supervisor(words, settings).run()


def train(words: list[str]) -> int:
    """`train SETTINGS.toml [--resume] [--dry-run] [--best] [--replay RUN] [--section.name=value ...]`."""
    replayed = take_option(words, "--replay")
    recorded = None if replayed is None else Path(replayed)
    return train_command(words, program=NAME, kind=_settings_class(), trainer=partial(_trainer, replayed=recorded))


def _trainer(settings: "AsyncSettings", *, replayed: Path | None) -> dict[str, Any]:
    from rl_async_trainer.plan import ASYNC_UNUSED, describe_async_plan
    from rl_async_trainer.restoring import read_plan
    from rl_async_trainer.settings import schedule_problems
    from rl_trainer_parts.run.folder import require_format

    problems = list(schedule_problems(settings))
    if replayed is not None:
        require_format(replayed)
        if not problems:
            read_plan(replayed, settings.schedule_options)  # raises here if it cannot be replayed

    async def launch(
        settings: "AsyncSettings", inputs: "Inputs", folder: "RunFolder", console: "ConsoleTracker"
    ) -> int:
        with console.phase("loading the controller", is_brief=True):
            from rl_async_trainer.training_run import AsyncTrainingRun

        return await AsyncTrainingRun(settings, inputs, folder, console, replayed=replayed).run()

    own = {"describe": describe_async_plan, "launch": launch}
    return {**own, "also_refused": problems, "also_unused": ASYNC_UNUSED}


def status(words: list[str]) -> int:
    """`status RUN`."""
    parser = argparse.ArgumentParser(prog="rl-async-trainer status", description="Show what a live run is doing.")
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args(words)
    from rl_async_trainer.liveness.control_socket import ask_run

    for line in _status_lines(ask_run(options.run, {"do": "status"}, deadline_s=STATUS_DEADLINE_S)):
        say(line)
    return 0


def scale(words: list[str]) -> int:
    """`scale RUN --engines N`."""
    parser = argparse.ArgumentParser(
        prog="rl-async-trainer scale", description="Add engines to a live run, or remove some."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--engines", type=int, required=True, help="number of engines")
    options = parser.parse_args(words)
    from rich.console import Console

    from rl_async_trainer.liveness.control_socket import ask_run
    from rl_metrics.trackers import ConsoleTracker

    request = {"do": "scale", "engines": options.engines}
    with closing(ConsoleTracker(console=Console(stderr=True))) as console:  # stdout: the answer
        what = f"scaling to {counted(options.engines, 'engine')}"
        with console.phase(what, is_brief=True, detail=lambda: "new engines load the policy"):
            count = ask_run(options.run, request, deadline_s=SCALE_DEADLINE_S)
    say(f"the run now has {counted(count, 'engine')}")
    return 0


def _status_lines(answer: dict[str, Any]) -> list[str]:
    if "stage" in answer:
        stage = f"the run is {answer['stage']}, {answer['launch_s']:.0f} s after its launch; in progress:"
        return [stage, *(f"  {phase}" for phase in answer["running"])]
    schedule = answer["schedule"]
    lines = [
        f"step {schedule['step']} of {schedule['steps']}",
        f"versions: engines serve {schedule['served_version']}, the learner trains {schedule['learner_version']}",
        f"groups: {schedule['inflight']} in flight, {schedule['ready']} ready, {schedule['waiting']} waiting to start",
    ]
    if schedule["blocked_by"]:
        lines.append(f"the learner waits for {', '.join(schedule['blocked_by'])}")
    return [*lines, *(f"{name}: {role}" for name, role in answer["roles"].items())]


def simulate(words: list[str]) -> int:
    """`simulate [WORKLOAD.toml] ...`."""
    from rl_async_trainer.simulate import simulate

    return simulate(words)


if __name__ == "__main__":
    raise SystemExit(main())
