"""Ray for this process, with token authentication and, by default, sockets on loopback only.

The only file that starts or joins Ray. A running Ray is used unchanged.
"""

import logging
import os
import secrets
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_core.cluster.processes.guard import descendants, is_running, running_processes
from rl_core.errors import MissingExtraError, RoleError, SettingsError
from rl_core.files.locked_folders import make_locked_folder, remove_unlocked_folders
from rl_core.record_fields import settings_record

LOOPBACK = "127.0.0.1"
DEFAULT_TOKEN = Path("~/.ray/auth_token")
"""Ray's own default path of the token."""
NUM_STARTS = 2
ENDING_S = 10.0
PAUSE_S = 0.02
TOO_SLOW = "timed out during startup"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
ONLY_WHEN_ASKED = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Otherwise a call that comes after `stop_ray` starts another Ray, with default options, which can end the process."""
FAST_DEATH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Detects a lost node within 5 s; Ray's default is 15 s. A Ray alone on this machine keeps the default: it has no other
node to lose, and would end if this machine paused for 4 s."""


@settings_record
class RayOptions:
    """Options of the Ray runtime.

    Attributes:
        address: "host:port" of a cluster to join, whose token is in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
            ~/.ray/auth_token; None starts a cluster on this machine.
        bind_address: Listening address of a started cluster; any address other than loopback exposes it to the network.
        num_cpus: CPUs of a started cluster; None uses all.
        object_store_bytes: Size of a started cluster's object store; None uses Ray's default.
    """

    address: str | None = None
    bind_address: str = LOOPBACK
    num_cpus: int | None = None
    object_store_bytes: int | None = None


FOLDER_PREFIX = "rl-ray-head-"

_folders: list[tuple[Path, int]] = []
"""Folders of a Ray runtime started here, with the lock that marks this process as alive."""
_entered: list[Any] = []
"""The `ray` module once Ray was started or joined here."""


def start_ray(options: RayOptions | None = None) -> Any:
    """Start or join Ray and return the `ray` module; a running Ray is used unchanged, with its authentication.

    Raises:
        MissingExtraError: Ray is not installed.
        SettingsError: RAY_AUTH_MODE turns authentication off, or a token is missing.
        RoleError: The cluster does not answer or refuses the token, or Ray twice failed to start in time.
    """
    options = options or RayOptions()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        if "RAY_AUTH_MODE" not in os.environ:  # `ray.init` sets it when it starts Ray
            warnings.warn(
                "Ray runs without token authentication: anyone who can reach its ports can run code. Set "
                "RAY_AUTH_MODE=token before Ray is started and joined, or set it to disabled if this is intended.",
                stacklevel=2,
            )
        return sys.modules["ray"]
    ray = import_ray(options)
    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise Ray warns each time that another thread started it
    arguments: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR", "configure_logging": False}
    try:
        if options.address is not None:
            ray.init(address=options.address, **arguments)
        if options.address is not None or any(_is_started(ray, options, arguments) for _ in range(NUM_STARTS)):
            _entered.append(ray)
            return ray
    except (ConnectionError, RuntimeError) as error:
        where = f"the Ray cluster at {options.address}" if options.address else "Ray on this machine"
        raise RoleError(
            f"{where} could not be reached or started; check that both use the same token: {error}"
        ) from error
    raise RoleError(
        f"Ray on this machine did not start within its own limit of 30 s, {NUM_STARTS} times: the machine is too busy "
        "or out of memory. Run fewer other processes, or start a cluster yourself (ray start --head) and set its "
        "address."
    )


def _is_started(ray: Any, options: RayOptions, arguments: Mapping[str, Any]) -> bool:
    """Start Ray on this machine; return False if it exceeded Ray's fixed time limit."""
    parent = Path("/tmp")  # noqa: S108 - short, because Ray creates sockets below it; the folder is private
    remove_unlocked_folders(parent.glob(f"{FOLDER_PREFIX}*"))
    path, lock = make_locked_folder(parent, FOLDER_PREFIX, mode=0o700)
    _folders.append((path, lock))
    folder = str(path)
    try:
        ray.init(
            num_cpus=options.num_cpus,
            object_store_memory=options.object_store_bytes,
            include_dashboard=False,
            _node_ip_address=options.bind_address,
            _temp_dir=f"{folder}/ray",  # Ray makes it accessible to all users; its parent stays private
            **arguments,
        )
    except Exception as error:  # Ray has no specific type
        if type(error) is not Exception or TOO_SLOW not in str(error):
            raise
        _end_processes_of(folder)
        return False
    return True


def _end_processes_of(folder: str) -> None:
    """End leftovers of a failed start: processes with this start's folder on their command line.

    A new child has no command line yet, so it is checked again.
    """
    ends_at = time.monotonic() + ENDING_S
    while time.monotonic() < ends_at:
        starting = [pid for pid, _ in descendants(os.getpid()) if is_running(pid) and not _command_line(pid)]
        left = [pid for pid in running_processes() if folder.encode() in _command_line(pid)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left and not starting:
            return
        time.sleep(PAUSE_S)


def _command_line(pid: int) -> bytes:
    """Return a process's command line; empty for one that is starting or has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def import_ray(options: RayOptions) -> Any:
    """Return the `ray` module, configured for authentication but not started.

    Raises:
        MissingExtraError: Ray is not installed.
        SettingsError: RAY_AUTH_MODE turns authentication off, or a token is missing.
    """
    loaded = sys.modules.get("ray")
    is_new = loaded is None or not loaded.is_initialized()
    if is_new:
        prepare_environment(options)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray is not installed. Install rl-core[ray].") from error
    if is_new and loaded is not None:
        _read_environment_again()
    return ray


def _read_environment_again() -> None:
    """Update values that an already imported Ray read at import; `ray.init` rereads the mode itself."""
    from ray import _raylet
    from ray._private import auto_init_hook, ray_constants

    auto_init_hook.enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0"
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def prepare_environment(options: RayOptions) -> None:
    """Set the environment variables of Ray and its workers.

    Raises:
        SettingsError: RAY_AUTH_MODE has another value, or a cluster's token is missing.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise SettingsError(
            f"Ray requires token authentication here; RAY_AUTH_MODE is {mode!r}. Unset it, or call ray.init() "
            "yourself first: a running Ray is used unchanged."
        )
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if options.address is not None and not (has_token or _has_default_token()):
        raise SettingsError(
            f"joining the Ray cluster at {options.address} needs its token: set RAY_AUTH_TOKEN or "
            f"RAY_AUTH_TOKEN_PATH, or write it to {DEFAULT_TOKEN}."
        )
    if options.address is None and not has_token:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token"
    is_alone = options.address is None and options.bind_address == LOOPBACK
    for name, value in {**QUIET, **ONLY_WHEN_ASKED, **({} if is_alone else FAST_DEATH)}.items():
        os.environ.setdefault(name, value)
    if is_alone:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # otherwise Ray replaces loopback by the host's address


def stop_ray() -> None:
    """End the Ray runtime that `start_ray` started, or leave a joined one; keep one that was already running."""
    while _entered:
        _entered.pop().shutdown()
    while _folders:
        path, lock = _folders.pop()
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _has_default_token() -> bool:
    try:
        return DEFAULT_TOKEN.expanduser().exists()
    except (OSError, RuntimeError):  # the user has no home folder, or another user's
        return False
