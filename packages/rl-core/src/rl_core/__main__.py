"""`python -m rl_core` is `rl-core`."""

import sys

from rl_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
