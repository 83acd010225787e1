"""The queue on a Ray cluster survives killed nodes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "support" / "ray_nodes.py"


def test_nodes_that_own_rows_and_hold_leases_are_killed():
    """Run in a separate process, because a process joins one Ray cluster at a time."""
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    said = [
        line for line in found.stdout.splitlines() if line.split(" ")[0] in ("leased", "unsettled", "acked", "ledger")
    ]
    assert said == [
        "leased ['p0', 'p1']",
        "unsettled ['p0', 'p1']",
        "acked ['p0', 'p1', 'p2', 'p3'] 4 2",
        "ledger [('done', 2), ('done', 2), ('done', 1), ('done', 1)]",
    ]
