"""What an agent is asked to do, and the outcome of it."""

from rl_core.data import Json, Prompt
from rl_core.record_fields import record
from rl_rollout.rewards.protocol import AgentRun, RewardResult


@record
class AgentTask:
    """What an agent is asked to do.

    Attributes:
        prompt: The row, with its messages, columns and ground truth.
        base_url: Of the gateway; clients of OpenAI's API append "/v1".
        api_key: Of the session.
        session_index: Which session of the prompt.
    """

    prompt: Prompt
    base_url: str
    api_key: str
    session_index: int = 0

    @property
    def text(self) -> str:
        """The prompt as one text."""
        if not self.prompt.messages:
            return str(self.prompt.columns.get("prompt", ""))
        return "\n\n".join(str(message.get("content", "")) for message in self.prompt.messages)

    def shown(self, columns: tuple[str, ...]) -> dict[str, Json]:
        """The prompt as a program gets it: without its ground truth, and with these columns alone."""
        prompt = self.prompt
        chosen = {name: prompt.columns.get(name) for name in columns}
        return {"uid": prompt.uid, "prompt": self.text, "messages": list(prompt.messages), "columns": chosen}


@record
class AgentOutcome:
    """Outcome of an agent.

    Attributes:
        run: How its program ran; None where it was none.
        reward: That it gave itself; None leaves it to the scorer.
    """

    run: AgentRun | None = None
    reward: RewardResult | None = None
