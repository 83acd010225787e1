"""Ranks that switch from one parallel layout to another, so that tests share their processes."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_distill.megatron import rank_tensors
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.parallel import RankPosition, group_of_copies, initialize_groups
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import ParallelOptions


class RearrangedHost(RankHost):
    def rearrange(self, parallel: ParallelOptions) -> RankPosition:
        """Free every model and create the process groups of another layout with the same number of ranks."""
        self.close()
        self._parallel = parallel
        parallel_state.destroy_model_parallel()
        initialize_groups(parallel, seed=self._seed)
        return RankPosition.of_this_rank()

    def ends_in_order(self) -> bool:
        """Return whether a long collective that began first has ended when a short one has."""
        group = group_of_copies(of_experts=False)
        parts = [torch.ones(count) for count in (1_000_000, 1)]
        works = [
            dist.all_gather_into_tensor(part.new_empty(group.size() * len(part)), part, group=group, async_op=True)
            for part in parts
        ]
        works[-1].wait()
        is_in_order = works[0].is_completed()
        works[0].wait()
        return is_in_order

    def read_stale(self, name: str) -> None:
        """Let readers of a model's weights see those that were not gathered after the last step."""
        stale, gather = self._loaded(name)._chunks, rank_tensors.gather_weights
        rank_tensors.gather_weights = lambda chunks: None if chunks is stale else gather(chunks)


class RearrangedRanks(LearnerRanks):
    host = "rearranged_ranks:RearrangedHost"

    def rearrange(self, parallel: ParallelOptions) -> None:
        """Switch the ranks to another layout of as many ranks; their models are freed."""
        assert parallel.ranks == self.parallel.ranks
        self.places = self.call_all(RearrangedHost.rearrange, parallel)
        self.parallel = parallel
