"""`check-machine [SETTINGS.toml]`: whether this machine can run a trainer, or these settings."""

from rl_core.cluster import RayOptions, describe_shares, start_ray, stop_ray
from rl_core.errors import RLError
from rl_core.terminal_text import json_text
from rl_trainer_parts.commands.command_line import say
from rl_trainer_parts.machine.judging import ANY_RUN, Check, judge_machine
from rl_trainer_parts.machine.needs import needs_of
from rl_trainer_parts.machine.readings import read_machine
from rl_trainer_parts.settings.schema import Settings

WIDTH = 14


def check_machine(settings: Settings | None, *, as_json: bool) -> int:
    """Print every check with what to do; gives 0 where there is no problem, else 1.

    Args:
        settings: Of a run; None checks for any trainer.
        as_json: Print one object.
    """
    needs = ANY_RUN if settings is None else needs_of(settings)
    checks = judge_machine(read_machine(needs.run_folder), needs)
    if needs.ray_address is not None:
        checks.append(join_ray(needs.ray_address))
    count = {state: sum(check.state == state for check in checks) for state in ("problem", "warning")}
    if as_json:
        say(json_text({"ok": not count["problem"], "checks": [check._asdict() for check in checks]}).rstrip("\n"))
    else:
        for check in checks:
            say(f"{check.state:<8} {check.name:<{WIDTH}} {check.found}")
            if check.advice:
                say(f"{'':<8} {'':<{WIDTH}} try: {check.advice}")
        words = (f"{number} {state}{'' if number == 1 else 's'}" for state, number in count.items())
        say(", ".join(words))
    return 1 if count["problem"] else 0


def join_ray(address: str) -> Check:
    """Join a Ray cluster as a run would, and leave it."""
    try:
        ray = start_ray(RayOptions(address=address))
        nodes = sum(node["Alive"] for node in ray.nodes())
        there = ray.cluster_resources()
    except RLError as error:
        advice = "Start it with `ray start --head` from the same environment, with the same token in RAY_AUTH_TOKEN."
        return Check("ray cluster", "problem", str(error), advice)
    finally:
        stop_ray()
    shares = describe_shares(there.get("CPU", 0), there.get("GPU", 0))
    found = f"{address} has {nodes} node{'' if nodes == 1 else 's'} with {shares}"
    return Check("ray cluster", "ok", found)
