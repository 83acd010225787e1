"""Entry point of `python -m rl_metrics`, which is `rl-metrics`."""

import sys

from rl_metrics.cli import main

if __name__ == "__main__":
    sys.exit(main())
