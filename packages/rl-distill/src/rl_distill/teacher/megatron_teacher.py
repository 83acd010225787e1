"""A teacher's replica on Megatron, with its own ranks and a thread that calls them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl_core.cluster import ClusterOptions, ResourcePool
from rl_core.data import Batch, Ragged, RowKey
from rl_core.errors import EngineDiedError, NotReadyError, RLError
from rl_core.gpus import GpuUse
from rl_core.record_fields import converts_arguments
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.megatron.learner import MegatronTeacherModel
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import LearnerOptions
from rl_distill.parallel_layout import teacher_layout
from rl_distill.teacher.protocol import TeacherTraits
from rl_distill.teacher.scores import TeacherRow, TeacherScores

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlace:
    """Placement and limits of a replica's ranks.

    Attributes:
        tensor: Number of ranks that share each matrix, and the experts of a mixture; see `teacher_layout`.
        cluster: Where ranks run: processes on this machine, or Ray actors.
        pool: Resources of the ranks; None shares those of the machine.
        dtype: Computation dtype.
        max_batch_tokens: Maximum tokens per micro-batch.
        max_tokens: Maximum trajectory length in tokens; None uses the model's.
        num_threads: CPU threads of each rank; None keeps torch's setting.
        temperature: Temperature of the distribution; divides the logits.
        start_deadline_s: Maximum seconds for the ranks to start.
        call_deadline_s: Maximum seconds for a call to the ranks.
    """

    tensor: int = 1
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    pool: ResourcePool | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch_tokens: int = 8192
    max_tokens: int | None = None
    num_threads: int | None = None
    temperature: float = 1.0
    start_deadline_s: float = 900.0
    call_deadline_s: float = 3600.0


class MegatronReplica:
    """A `TeacherReplica` whose model runs on ranks in separate processes."""

    at_once = 1
    can_sleep = True

    @converts_arguments
    def __init__(self, model: Path, place: MegatronPlace) -> None:
        """Store the model; `start` starts its ranks."""
        self._folder = model
        self._place = place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron teacher")
        self._ranks: LearnerRanks | None = None
        self._model: MegatronTeacherModel | None = None
        self._is_closed = False

    @property
    def traits(self) -> TeacherTraits:
        """See `TeacherReplica.traits`."""
        config = self._started().config
        longest = min(config.max_position_embeddings, self._place.max_tokens or config.max_position_embeddings)
        return TeacherTraits(vocab_size=config.vocab_size, hidden_size=config.hidden_size, max_tokens=longest)

    @property
    def most_top_k(self) -> int:
        """See `TeacherReplica.most_top_k`."""
        return self._started().config.vocab_size

    async def start(self) -> None:
        """See `TeacherReplica.start`."""
        await self._in_thread(self._load)

    async def score(self, sequences: Sequence[TeacherRow], *, top_k: int, with_hidden: bool) -> list[TeacherScores]:
        """See `TeacherReplica.score`."""
        keys = [RowKey("row", index, 0) for index in range(len(sequences))]
        batch = Batch(keys, {"input_ids": Ragged.from_rows([row.input_ids for row in sequences], dtype="int32")})
        model, temperature = self._started(), self._place.temperature
        logprobs, ids, hidden = await self._in_thread(
            lambda: model.score(batch, top_k=top_k, temperature=temperature, has_hidden=with_hidden)
        )
        states: Sequence[Any] = [None] * len(sequences) if hidden is None else list(hidden)
        return [
            TeacherScores(logprobs=values, token_ids=tokens, hidden=state)
            for values, tokens, state in zip(logprobs, ids, states, strict=True)
        ]

    async def gpu_use(self) -> list[GpuUse]:
        """See `TeacherReplica`."""
        ranks = self._ranks
        return [] if ranks is None else await self._in_thread(ranks.gpu_use)

    async def wake(self) -> None:
        """Do nothing; the next call restores the weights."""

    async def sleep(self) -> None:
        """See `TeacherReplica.sleep`."""
        await self._in_thread(self._started().offload)

    async def close(self) -> None:
        """See `TeacherReplica.close`; a call in progress fails."""
        self._is_closed = True
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await asyncio.to_thread(ranks.close)
        self._thread.shutdown(wait=False)

    # -- internal

    def _started(self) -> MegatronTeacherModel:
        if self._model is None:
            raise NotReadyError("the teacher's model is not loaded; call start first.")
        return self._model

    def _load(self) -> None:
        """Start the ranks and build the model on them, in the thread."""
        place = self._place
        ranks = LearnerRanks(
            teacher_layout(place.tensor, parse_policy_config(read_policy_config(self._folder))),
            cluster=place.cluster,
            pool=place.pool,
            name="megatron teacher",
            num_threads=place.num_threads,
            deadline_s=place.start_deadline_s,
            call_deadline_s=place.call_deadline_s,
        )
        self._ranks = ranks
        try:
            if self._is_closed:
                raise NotReadyError("the teacher was closed while it started.")
            options = LearnerOptions(
                dtype=place.dtype, micro_batch_tokens=place.max_batch_tokens, num_threads=place.num_threads
            )
            self._model = MegatronTeacherModel(self._folder, options, ranks=ranks)
        except BaseException:
            ranks.close()
            raise

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Call the ranks in the thread; if the call ended them, report the replica as dead.

        An error on one rank ends all ranks, since the others may wait for it.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        except EngineDiedError:
            raise
        except Exception as error:
            if self._model is None or (self._ranks is not None and self._ranks.is_alive):
                raise
            cause = f"{type(error).__name__}: {error}" if isinstance(error, RLError) else repr(error)
            raise EngineDiedError(f"the teacher's ranks ended: {cause}") from error
