"""A teacher as a frozen Megatron model that scores tokens and returns its top tokens and hidden states."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, Ragged, token_positions
from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.ranked_model import RankedModel
from rl_distill.stepping import check_open, check_temperature


class MegatronTeacherModel(RankedModel):
    """A frozen policy that scores tokens for distillation."""

    kind, trains = "teacher", False

    @property
    def config(self) -> PolicyConfig:
        """The model's configuration."""
        return self._source.config

    def score(
        self, batch: Batch, *, top_k: int, temperature: float = 1.0, has_hidden: bool = False
    ) -> tuple[Ragged, Ragged, Ragged | None]:
        """Score each token given the tokens before it.

        Args:
            batch: Batch with `input_ids`.
            top_k: Number of most probable tokens to return.
            temperature: Divisor of the logits.
            has_hidden: True to return the hidden states.

        Returns:
            float32 logprobs and int32 ids [K + 1] per token, with the token itself first and then the most probable
            ones; 0 and -1 at the first token of each trajectory. float32 hidden states [H] that predict each token, or
            None.

        Raises:
            SettingsError: top_k exceeds the vocabulary, or the temperature is out of range.
            ShapeError: A token is outside the vocabulary, or a trajectory is too long.
        """
        check_open(self._is_open)
        check_temperature(temperature)
        most = self.config.vocab_size
        if not 0 <= top_k <= most:
            raise SettingsError(f"top_k must be from 0 to {most}, the size of the teacher's vocabulary; found {top_k}.")
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
