"""`python -m rl_rollout` is `rl-rollout`."""

import sys

from rl_rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
