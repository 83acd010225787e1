"""Runs untrusted programs and commands in separate, limited processes, and removes everything that they leave."""

from rl_rollout.sandbox.options import GUARANTEES, Level, ProgramRun, SandboxLimits, SandboxOptions
from rl_rollout.sandbox.sandbox import Command, Sandbox, sandbox_folder

__all__ = [
    "GUARANTEES",
    "Command",
    "Level",
    "ProgramRun",
    "Sandbox",
    "SandboxLimits",
    "SandboxOptions",
    "sandbox_folder",
]
