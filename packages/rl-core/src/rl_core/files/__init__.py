"""Files: durable writes, checksums, zarr arrays, and bounded reads of untrusted files."""

from rl_core.files.durable import checksum, current_umask, sync_file, sync_folder, write_atomically, write_durably
from rl_core.files.locked_folders import (
    cache_folder,
    locked_folder,
    make_locked_folder,
    open_lock_file,
    remove_unlocked_folders,
    temporary_folder,
)
from rl_core.files.plain_files import (
    StoredTensor,
    count_values,
    load_json,
    open_plain,
    parse_toml,
    preview,
    read_json,
    read_json_object,
    read_plain,
    read_record,
    read_safetensors_header,
    read_toml,
    require_plain,
)
from rl_core.files.trials import run_trial, try_arrow_files

__all__ = [
    "StoredTensor",
    "cache_folder",
    "checksum",
    "count_values",
    "current_umask",
    "load_json",
    "locked_folder",
    "make_locked_folder",
    "open_lock_file",
    "open_plain",
    "parse_toml",
    "preview",
    "read_json",
    "read_json_object",
    "read_plain",
    "read_record",
    "read_safetensors_header",
    "read_toml",
    "remove_unlocked_folders",
    "require_plain",
    "run_trial",
    "sync_file",
    "sync_folder",
    "temporary_folder",
    "try_arrow_files",
    "write_atomically",
    "write_durably",
]
