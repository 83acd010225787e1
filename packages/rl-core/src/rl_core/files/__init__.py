"""Files: durable writes, checksums, zarr arrays, JSON from strangers."""

from rl_core.files.bounded_json import count_values, load_json, load_json_as, shown, shown_path
from rl_core.files.checksums import checksum
from rl_core.files.durable import sync_file, sync_folder, write_durably
from rl_core.files.lock_files import open_lock_file
from rl_core.files.locked_folders import locked_folder, make_locked_folder, remove_unlocked_folders

__all__ = [
    "checksum",
    "count_values",
    "load_json",
    "load_json_as",
    "locked_folder",
    "make_locked_folder",
    "open_lock_file",
    "remove_unlocked_folders",
    "shown",
    "shown_path",
    "sync_file",
    "sync_folder",
    "write_durably",
]
