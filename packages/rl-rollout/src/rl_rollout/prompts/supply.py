"""Prompts in the source's order, kept by uid until they are settled. The queue's ledger records the progress."""

from collections.abc import Sequence

from rl_core.data import Prompt
from rl_core.errors import DataError
from rl_core.queue import LedgerEntry
from rl_rollout.prompts.source import PromptSource


class PromptSupply:
    """Returns prompts in order, and keeps those that may have to start again."""

    def __init__(self, source: PromptSource) -> None:
        """Start with the source's first prompt."""
        self._source = source
        self._open: dict[str, Prompt] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._source.epoch

    def next(self, count: int) -> list[Prompt]:
        """Return the next prompts."""
        prompts = self._source.next(count)
        self._open.update((prompt.uid, prompt) for prompt in prompts)
        return prompts

    def restore(self, ledger: Sequence[LedgerEntry]) -> None:
        """Skip the prompts that the queue has issued, and keep the unfinished ones.

        Raises:
            DataError: The queue's prompts differ from the source's, so it belongs to another run.
        """
        prompts = self._source.next(len(ledger))
        for entry, prompt in zip(ledger, prompts, strict=True):
            if entry.prompt_uid != prompt.uid:
                raise DataError(
                    f"the run's queue has prompt {entry.prompt_uid!r} at a position where these settings give "
                    f"{prompt.uid!r}. Resume with the prompt files, tokenizer, limits and seed of the run."
                )
            if entry.state in ("issued", "settled"):
                self._open[prompt.uid] = prompt

    def get(self, uid: str) -> Prompt:
        """Return an open prompt."""
        return self._open[uid]

    def done(self, uids: Sequence[str]) -> None:
        """Drop settled prompts."""
        for uid in uids:
            self._open.pop(uid, None)
