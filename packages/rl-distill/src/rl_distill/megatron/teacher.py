"""A teacher as a frozen megatron model: what it thinks likeliest at each token, and its hidden states."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, Ragged, token_positions
from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.ranked_model import RankedModel
from rl_distill.stepping import check_open, check_temperature


class MegatronTeacherModel(RankedModel):
    """A policy that never trains, and says what it thinks of every token."""

    kind, trains = "teacher", False

    @property
    def config(self) -> PolicyConfig:
        """Of the model."""
        return self._source.config

    def score(
        self, batch: Batch, *, top_k: int, temperature: float = 1.0, has_hidden: bool = False
    ) -> tuple[Ragged, Ragged, Ragged | None]:
        """What it says of each token, given those before it.

        Args:
            batch: Has `input_ids`.
            top_k: Likeliest tokens to give.
            temperature: Divides the logits.
            has_hidden: Also give the hidden states.

        Returns:
            float32 logprobs and int32 ids [K + 1] for each token, the token itself first and then the likeliest; 0 and
            -1 at the first token of each trajectory. float32 hidden states [H] from which each token is predicted, or
            None.

        Raises:
            SettingsError: There are not so many tokens, or the temperature is impossible.
            ShapeError: A token is not in the vocabulary, or a trajectory is too long.
        """
        check_open(self._is_open)
        check_temperature(temperature)
        most = self.config.vocab_size
        if not 0 <= top_k <= most:
            raise SettingsError(f"top_k must be from 0 to the teacher's {most} tokens; found {top_k}.")
        shares, rows = self._shares(batch.only({"input_ids"}))
        options = {"temperature": temperature, "top_k": top_k, "has_hidden": has_hidden}
        found: list[dict[str, NDArray[Any]]] = self._call_shares("score", shares, **options)
        ids = batch.ragged("input_ids")
        shape = (len(ids.values), top_k + 1)
        logprobs, tokens = np.zeros(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int32)
        hidden = np.zeros((len(ids.values), self.config.hidden_size), dtype=np.float32) if has_hidden else None
        for of_rank, named in zip(rows, found, strict=True):
            if not named:
                continue
            places = token_positions(ids.offsets[of_rank], ids.lengths[of_rank])
            logprobs[places], tokens[places] = named["logprobs"], named["ids"]
            if hidden is not None:
                hidden[places] = named["hidden"]
        tokens[ids.offsets[:-1]] = -1
        offsets = ids.offsets
        return Ragged(logprobs, offsets), Ragged(tokens, offsets), None if hidden is None else Ragged(hidden, offsets)
