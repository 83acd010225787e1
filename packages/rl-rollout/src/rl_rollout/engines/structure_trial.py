"""A script of `run_trial`: compiles a stranger's grammar, and computes the allowed first tokens.

llguidance bounds its own work almost everywhere, but a list of a billion items uses all available memory.
"""

import sys


def main(grammar: str) -> None:
    """Compile the grammar.

    Raises:
        ValueError: It is invalid.
    """
    from llguidance import LLMatcher, LLTokenizer

    sys.stdout.write("compiling it\n")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_bitmask()
    if problem := matcher.get_error():
        raise ValueError(problem)
