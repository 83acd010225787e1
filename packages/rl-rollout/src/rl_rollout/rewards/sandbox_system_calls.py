"""The system calls that a sandboxed program is refused, as a seccomp filter."""

import errno
import platform
import struct
from collections.abc import Iterable

# Number of each call on x86_64 and on aarch64.
SOCKETS = {"socket": (41, 198)}
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
ALWAYS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory that no limit counts, as are the next and the System V calls
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3 = (56, 220), 435
NEW_NAMESPACES = 0x7E020000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
FIRST_X32_CALL = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16


def system_call_filter(*, allows_network: bool, allows_signals: bool) -> bytes:
    """A filter that refuses calls with EPERM, and kills a process that calls as another architecture.

    Args:
        allows_network: False refuses `socket` for every family.
        allows_signals: False refuses to send signals, where other processes of the user could be reached.

    Returns:
        Instructions of 8 bytes each; nothing on a machine other than x86_64 and aarch64.
    """
    if platform.machine() not in MACHINES:
        return b""
    column, architecture = MACHINES[platform.machine()]
    refused = {**ALWAYS, **({} if allows_network else SOCKETS), **({} if allows_signals else SIGNALS)}
    return b"".join(_instructions([numbers[column] for numbers in refused.values()], CLONE[column], architecture))


def _instructions(refused: Iterable[int], clone: int, architecture: int) -> Iterable[bytes]:
    yield _instruction(LOAD, ARCHITECTURE)
    yield _instruction(EQUAL, architecture, if_true=1)
    yield _instruction(RETURN, KILL)
    yield _instruction(LOAD, NUMBER)
    yield _instruction(AT_LEAST, FIRST_X32_CALL, if_false=1)
    yield _instruction(RETURN, KILL)
    for number in refused:
        yield _instruction(EQUAL, number, if_false=1)
        yield _instruction(RETURN, REFUSE | errno.EPERM)
    yield _instruction(EQUAL, CLONE3, if_false=1)  # its flags are out of a filter's sight; C libraries then use clone
    yield _instruction(RETURN, REFUSE | errno.ENOSYS)
    yield _instruction(EQUAL, clone, if_false=3)
    yield _instruction(LOAD, FIRST_ARGUMENT)
    yield _instruction(ANY_BIT, NEW_NAMESPACES, if_false=1)
    yield _instruction(RETURN, REFUSE | errno.EPERM)
    yield _instruction(RETURN, ALLOW)


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
