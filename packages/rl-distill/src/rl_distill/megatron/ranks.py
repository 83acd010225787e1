"""Start, connect, call and stop all ranks of a learner as one."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from rl_core.cluster import BlockingGroup, ClusterOptions, ResourcePool, RoleContext, RoleSpec, process_stacks
from rl_core.errors import NotReadyError, SettingsError
from rl_core.gpus import GpuUse
from rl_core.record_fields import converts_arguments
from rl_distill.checkpoints.pieces import StoredPiece
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.parallel import RankPosition
from rl_distill.options import ParallelOptions
from rl_distill.parallel_layout import check_ranks

ROLE = "learner"

Host = TypeVar("Host", bound=RankHost)
Options = ParamSpec("Options")
Answer = TypeVar("Answer")


class LearnerRanks:
    """The ranks that hold a learner's models; several models can share them.

    Attributes:
        host: Factory of the role of each rank that is not in this process.
    """

    host = "rl_distill.megatron.host:RankHost"

    def __init__(
        self,
        parallel: ParallelOptions,
        *,
        cluster: ClusterOptions | None = None,
        pool: ResourcePool | None = None,
        name: str = ROLE,
        num_threads: int | None = None,
        deadline_s: float = 900.0,
        call_deadline_s: float = 3600.0,
    ) -> None:
        """Start the ranks and connect them.

        Args:
            parallel: Parallel layout of the ranks.
            cluster: Where ranks run; None runs a single rank in this process and several in processes of this machine.
            pool: Resources that the ranks may use.
            name: Name of the ranks' role in logs and errors.
            num_threads: Threads of each CPU rank; None leaves torch's setting.
            deadline_s: Maximum wait for all ranks to start, in seconds.
            call_deadline_s: Maximum wait for a call such as an optimizer step, in seconds.

        Raises:
            SettingsError: The layout is impossible, or there are too few CPUs or GPUs.
            DeadlineError: The ranks did not start in time.
            RoleError: A rank died.
        """
        check_ranks(parallel)
        is_inline = parallel.ranks == 1 if cluster is None else cluster.kind == "inline"
        if is_inline and parallel.ranks > 1:
            raise SettingsError(
                f"a cluster of kind 'inline' must have one rank; found {parallel.ranks}. Set its kind to "
                '"process" or "ray".'
            )
        self.parallel = parallel
        self._host: RankHost | None = None
        self._group: BlockingGroup | None = None
        self._call_deadline_s = call_deadline_s
        self._ended_by = ""
        options = {"parallel": parallel, "num_threads": num_threads, "seed": 0}
        if is_inline:
            context = RoleContext(name=name, rank=0, size=1, address="127.0.0.1", incarnation=1)
            self._host = RankHost(context=context, **options)  # type: ignore[arg-type]
            self.places: list[RankPosition] = [self._host.join(None)]
            return
        # Megatron overlaps a GPU's collectives with its matrix products only if kernels start in order.
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        spec = RoleSpec(name=name, factory=self.host, kwargs=options, environment=environment)
        cluster = cluster or ClusterOptions(kind="process")
        self._group = BlockingGroup.start(cluster, spec, size=parallel.ranks, pool=pool, deadline_s=deadline_s)
        try:
            rendezvous = self._group.call(0, RankHost.listen.__name__, deadline_s=deadline_s)
            self.places = self._group.call_all(RankHost.join.__name__, rendezvous, deadline_s=deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_inline(self) -> bool:
        """True if the only rank is in this process, so results need no transfer."""
        return self._host is not None

    @property
    def is_alive(self) -> bool:
        """True until the ranks are stopped or one of them dies."""
        return self._host is not None or (self._group is not None and self._group.is_alive)

    @overload
    def call_all(
        self,
        method: Callable[Concatenate[Host, Options], Coroutine[Any, Any, Answer]],
        *args: Options.args,
        **kwargs: Options.kwargs,
    ) -> list[Answer]: ...

    @overload
    def call_all(
        self, method: Callable[Concatenate[Host, Options], Answer], *args: Options.args, **kwargs: Options.kwargs
    ) -> list[Answer]: ...

    def call_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank's host, such as `RankHost.build`.

        If a rank raises or dies, all ranks are stopped, because the others may be waiting for it in a collective.

        Raises:
            RoleError: A rank died; the message names it and the cause.
            DeadlineError: The ranks did not answer in time.
            Exception: The first rank's exception, with its name and traceback.
        """
        if self._host is not None:
            return [getattr(self._host, method.__name__)(*args, **kwargs)]
        name, deadline_s = method.__name__, self._call_deadline_s
        return self._together(lambda ranks: ranks.call_all(name, *args, deadline_s=deadline_s, **kwargs))

    def call_each(self, method: Callable[..., Answer], arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """Call a method of every rank's host, each with its own arguments. Raises the errors of `call_all`."""
        if self._host is not None:
            return [getattr(self._host, method.__name__)(*arguments[0])]
        name, deadline_s = method.__name__, self._call_deadline_s
        return self._together(lambda ranks: ranks.call_each(name, arguments, deadline_s=deadline_s))

    @converts_arguments
    def finish_save(self, directory: Path) -> list[list[StoredPiece]]:
        """Wait until every rank has written its part of a checkpoint; return what each wrote. Training can continue."""
        host = self._host
        return self.call_all(RankHost.wait_for_save, directory) if host is None else [host.finish_save(directory)]

    def expect_engines(self, name: str, num_receivers: int) -> None:
        """Set how many engines every rank's sender of a model expects. Thread-safe, even while another call waits."""
        if self._host is None:
            self.call_all(RankHost.expect_engines, name, num_receivers)

    def check_alive(self) -> None:
        """Check that every rank is alive. Raises the errors of `call_all`."""
        self.call_all(RankHost.check_alive)

    def gpu_use(self) -> list[GpuUse]:
        """Return the use of each rank's GPU since the last call; empty on CPUs. Raises the errors of `call_all`."""
        return [use for of_rank in self.call_all(RankHost.gpu_use) for use in of_rank]

    def stacks(self, *, deadline_s: float) -> list[str]:
        """Return each rank's current stack. Thread-safe, even while another call waits.

        Raises nothing: the text of a rank that is dead or does not answer reports that.
        """
        group = self._group
        if self._host is not None:
            return [f"The learner's only rank is in this process.\n{process_stacks()}"]
        if group is None:
            return [f"The ranks of the learner were stopped{self._ended_by}."]
        return group.stacks(deadline_s=deadline_s)

    def close(self) -> None:
        """Stop every rank. Can be called twice."""
        group, self._group = self._group, None
        if self._host is not None:
            self._host.close()
        if group is not None:
            group.close()

    def _together(self, call: Callable[[BlockingGroup], list[Any]]) -> list[Any]:
        if self._group is None:
            raise NotReadyError(f"the ranks of the learner were stopped{self._ended_by}. Start new ones.")
        try:
            return call(self._group)
        except BaseException as error:
            self._ended_by = f" by an earlier {type(error).__name__}"
            self.close()
            raise
