"""What a role says of itself when it is asked what it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_async_trainer.hang_report import Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """What a role does right now.

    Attributes:
        doing: In words.
        waits: What it waits for.
        holds: Groups that it has.
        counts: Anything that can be counted.
    """

    doing: str
    waits: tuple[Wait, ...] = ()
    holds: tuple[str, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """As `status` prints it."""
        counts = ", ".join(f"{name} {value:g}" for name, value in self.counts.items())
        waits = "; ".join(f"for {wait.what} from {wait.on}, {wait.since_s:.0f} s" for wait in self.waits)
        return "; ".join(part for part in (self.doing, counts, waits and f"waits {waits}") if part)
