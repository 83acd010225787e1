"""Skip caches store rollouts and replay them instead of generating new ones. Importing this does not load zarr."""

from rl_rollout.skip.cache import SkipCache, StepRollouts
from rl_rollout.skip.entries import EntryKey, EntryStore, Manifest, StoredEntry
from rl_rollout.skip.fingerprint import Difference, RolloutOrigin, package_versions, prompt_digest, with_file_contents
from rl_rollout.skip.groupwise import GroupwiseCache
from rl_rollout.skip.options import SkipOptions, StepSelection

__all__ = [
    "Difference",
    "EntryKey",
    "EntryStore",
    "GroupwiseCache",
    "Manifest",
    "RolloutOrigin",
    "SkipCache",
    "SkipOptions",
    "StepRollouts",
    "StepSelection",
    "StoredEntry",
    "package_versions",
    "prompt_digest",
    "with_file_contents",
]
