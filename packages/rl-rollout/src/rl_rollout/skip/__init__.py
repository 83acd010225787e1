"""Skip caches store rollouts and replay them instead of generating new ones. Importing this does not load zarr."""

from rl_rollout.skip.cache import SkipCache, StepRollouts
from rl_rollout.skip.fingerprint import Difference, RolloutOrigin, package_versions, with_file_contents
from rl_rollout.skip.groupwise import GroupwiseCache
from rl_rollout.skip.manifest import EntryKey
from rl_rollout.skip.options import SkipOptions, StepSelection
from rl_rollout.skip.store import EntryStore, open_folder

__all__ = [
    "Difference",
    "EntryKey",
    "EntryStore",
    "GroupwiseCache",
    "RolloutOrigin",
    "SkipCache",
    "SkipOptions",
    "StepRollouts",
    "StepSelection",
    "open_folder",
    "package_versions",
    "with_file_contents",
]
