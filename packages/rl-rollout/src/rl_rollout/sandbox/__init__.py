"""Programs and commands that nobody trusts, each in processes of its own under limits, of which nothing is left."""

from rl_rollout.sandbox.options import GUARANTEES, Level, ProgramRun, SandboxLimits, SandboxOptions
from rl_rollout.sandbox.sandbox import Command, Sandbox

__all__ = ["GUARANTEES", "Command", "Level", "ProgramRun", "Sandbox", "SandboxLimits", "SandboxOptions"]
