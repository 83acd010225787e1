"""The child process of `run_trial`: limits itself, then runs `main` of a script."""

import json
import resource
import runpy
import sys


def run() -> None:
    """Read `{"limits": ..., "request": ...}` from standard input; end with the problem as the last line of stderr."""
    sent = json.load(sys.stdin)
    for limit, most in sent["limits"]:
        resource.setrlimit(limit, (most, most))
    try:
        runpy.run_path(sys.argv[1])["main"](**sent["request"])
    except MemoryError:
        sys.exit("it needs more memory than the trial allows")
    except BaseException as error:  # a Rust panic is not an Exception
        name, text = type(error).__name__, str(error).partition("\n")[0]
        sys.exit(text if text and isinstance(error, ValueError) else f"{name}: {text}")


if __name__ == "__main__":
    run()
