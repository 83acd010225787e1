"""`check-machine [SETTINGS.toml]`: check whether this machine can run a trainer, or these settings."""

from rl_core.terminal_text import json_text
from rl_trainer_parts.commands.output import counted, say
from rl_trainer_parts.machine.judging import ANY_RUN, judge_machine
from rl_trainer_parts.machine.needs import needs_of
from rl_trainer_parts.machine.readings import read_machine
from rl_trainer_parts.settings.schema import Settings

WIDTH = 14


def check_machine(settings: Settings | None, *, as_json: bool) -> int:
    """Print every check with its advice, and return 1 if there is a problem, else 0.

    Args:
        settings: Settings of a run; None checks for the default settings.
        as_json: Print one JSON object.
    """
    needs = ANY_RUN if settings is None else needs_of(settings)
    checks = judge_machine(read_machine(needs.run_folder), needs)
    count = {state: sum(check.state == state for check in checks) for state in ("problem", "warning")}
    if as_json:
        listed = [{**check._asdict(), "advice": check.advice} for check in checks]
        say(json_text({"ok": not count["problem"], "checks": listed}).rstrip("\n"))
    else:
        for check in checks:
            say(f"{check.state:<8} {check.name:<{WIDTH}} {check.found}")
            if check.advice:
                say(f"{'':<8} {'':<{WIDTH}} try: {check.advice}")
        say(", ".join(counted(number, state) for state, number in count.items()))
    return 1 if count["problem"] else 0
