"""Run many commands in one fresh interpreter, and record for each how it ended and what it imported.

python command_driver.py CASES.json RESULTS.json
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from rl_sync_trainer.main import main

HEAVY = ("vllm", "megatron", "ray")


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run one command with its arguments and environment variables."""
    os.environ.update(case["environment"])
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(case["words"])
    for name in case["environment"]:
        del os.environ[name]
    return {
        "status": status,
        "output": output.getvalue(),
        "errors": errors.getvalue(),
        "heavy": [name for name in HEAVY if name in sys.modules],
        "has_torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: run_case(case) for name, case in cases.items()}))
