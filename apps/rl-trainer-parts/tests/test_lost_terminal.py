"""A command keeps its exit status if nobody reads its output."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from rl_trainer_parts.commands.command_line import run_command

def command(words):
    print("what nobody reads")
    return 129

sys.exit(run_command(["command"], {"command": command}))
"""


def test_the_exit_status_is_the_commands() -> None:
    reader, writer = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=writer, env=environment)
    os.close(writer)
    os.close(reader)
    assert process.wait(timeout=120) == 129
