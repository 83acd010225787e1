"""Endless, resumable order of training prompts, and the prompts that are not settled."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Json, Prompt
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.queue import LedgerEntry
from rl_rollout.prompts.prompt_set import PromptSet


class PromptSource:
    """Epochs over a prompt set, each in its own order, independent of torch's random state.

    A prompt's uid ends with its epoch (`...-e0`), so that it is unique in the run.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, is_shuffled: bool = True) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            prompts: The prompts.
            seed: Seed of the orders; at least 0.
            is_shuffled: False gives file order in every epoch.
        """
        if seed < 0:
            raise SettingsError(f"the seed of the prompt order must be at least 0; found {seed}.")
        self._prompts = prompts
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts. Every epoch visits each prompt once."""
        return [self._next_prompt() for _ in range(num_prompts)]

    def state(self) -> dict[str, Json]:
        """Return the source's position, as JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "is_shuffled": self._is_shuffled,
            "fingerprint": self._prompts.fingerprint,
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Restore a position that `state` returned.

        Raises:
            CheckpointError: The state is invalid.
            SettingsError: The state belongs to other prompts or another order.
        """
        mine = self.state()
        if set(state) != set(mine):
            raise CheckpointError(f"a prompt source's state must have {sorted(mine)}; found {sorted(state)}.")
        for name in ("fingerprint", "seed", "is_shuffled"):
            if state[name] != mine[name]:
                raise SettingsError(
                    f"the saved prompt order has {name} = {state[name]!r}; this run has {mine[name]!r}. "
                    "Resume with the same prompt files, tokenizer, image processor, limits and seed, or a new run."
                )
        epoch, position = state["epoch"], state["position"]
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < len(self._prompts):
            raise CheckpointError(
                f"the saved prompt order is at epoch {epoch!r}, position {position!r}; expected whole numbers "
                f"from 0, with the position below {len(self._prompts)}."
            )
        self._epoch, self._position = epoch, position
        self._order = self._epoch_order(epoch)

    def _next_prompt(self) -> Prompt:
        prompt = self._prompts.prompt(int(self._order[self._position]), uid_suffix=f"-e{self._epoch}")
        self._position += 1
        if self._position == len(self._prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order(self._epoch)
        return prompt

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        num_prompts = len(self._prompts)
        if not self._is_shuffled:
            return np.arange(num_prompts)
        # Sorting raw Philox words, unlike Generator.permutation, is the same in every numpy version.
        words = np.random.Philox(key=[self._seed, epoch]).random_raw(num_prompts)
        return np.argsort(words, kind="stable")


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
