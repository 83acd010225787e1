"""Prompts in the order of the source, known by uid until they are settled; the queue's ledger says how far it is."""

from collections.abc import Sequence

from rl_core.data import Prompt
from rl_core.errors import DataError
from rl_core.queue import LedgerEntry
from rl_rollout.prompts.source import PromptSource


class PromptSupply:
    """Gives prompts in order, and keeps those that may have to be started again."""

    def __init__(self, source: PromptSource) -> None:
        """Begin with the source's first prompt."""
        self._source = source
        self._open: dict[str, Prompt] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._source.epoch

    def next(self, count: int) -> list[Prompt]:
        """The next prompts."""
        prompts = self._source.next(count)
        self._open.update((prompt.uid, prompt) for prompt in prompts)
        return prompts

    def restore(self, ledger: Sequence[LedgerEntry]) -> None:
        """Go on behind the prompts that a queue has.

        Raises:
            DataError: The queue has other prompts than the source gives: it belongs to another run.
        """
        prompts = self._source.next(len(ledger))
        for entry, prompt in zip(ledger, prompts, strict=True):
            if entry.prompt_uid != prompt.uid:
                raise DataError(
                    f"the run's queue was issued prompt {entry.prompt_uid!r} where the prompts of these settings have "
                    f"{prompt.uid!r}. Resume with the prompt files, tokenizer, limits and seed of the run."
                )
            if entry.state in ("issued", "settled"):
                self._open[prompt.uid] = prompt

    def get(self, uid: str) -> Prompt:
        """A prompt that is open."""
        return self._open[uid]

    def done(self, uids: Sequence[str]) -> None:
        """These need no prompt any more."""
        for uid in uids:
            self._open.pop(uid, None)
