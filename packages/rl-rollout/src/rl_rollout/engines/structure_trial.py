"""Run as a script, in a child: compiles a grammar of a stranger, and asks what may come first.

llguidance bounds its own work almost everywhere, but a list of a billion items takes all memory there is.
"""

import json
import sys


def main() -> None:
    """Read `{"grammar": ...}` from standard input; print "passed" in the end."""
    from llguidance import LLMatcher, LLTokenizer

    sys.stdout.write("compiling it\n")
    sys.stdout.flush()
    matcher = LLMatcher(LLTokenizer("byte"), json.load(sys.stdin)["grammar"], log_level=0)
    matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error().partition("\n")[0] or "passed")


if __name__ == "__main__":
    main()
