"""A script for a child process that compiles an untrusted grammar, and computes the allowed first tokens.

llguidance bounds its own work almost everywhere, but a list of a billion items uses all available memory.
"""

import json
import sys


def main() -> None:
    """Read `{"grammar": ...}` from standard input, and print "passed" on success."""
    from llguidance import LLMatcher, LLTokenizer

    sys.stdout.write("compiling it\n")
    sys.stdout.flush()
    matcher = LLMatcher(LLTokenizer("byte"), json.load(sys.stdin)["grammar"], log_level=0)
    matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error().partition("\n")[0] or "passed")


if __name__ == "__main__":
    main()
