"""Tasks and outcomes of agents. It needs no gateway, so the loops import without its extra."""

from rl_core.data import Json, Prompt
from rl_core.record_fields import record
from rl_rollout.rewards.protocol import AgentRun, RewardResult


@record
class AgentTask:
    """An agent's task.

    Attributes:
        prompt: The row, with its messages, columns and ground truth.
        base_url: URL of the gateway. Clients of OpenAI's API append "/v1".
        api_key: Key of the session.
        session_index: Index of the session in the group.
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
        """Return the prompt for a program: without its ground truth, and with only these columns."""
        prompt = self.prompt
        chosen = {name: prompt.columns.get(name) for name in columns}
        return {"uid": prompt.uid, "prompt": self.text, "messages": list(prompt.messages), "columns": chosen}


@record
class AgentOutcome:
    """The outcome of an agent.

    Attributes:
        run: How its program ran; None if it was not a program.
        reward: The reward that it returned; None leaves it to the scorer.
    """

    run: AgentRun | None = None
    reward: RewardResult | None = None
