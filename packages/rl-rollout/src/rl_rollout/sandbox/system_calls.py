"""Seccomp filter of the system calls that a sandboxed program may not make."""

import errno
import platform
import struct
from collections.abc import Iterable
from typing import Literal

# Number of each call on x86_64 and on aarch64.
SOCKETS = {
    "socket": (41, 198),
    "setsockopt": (54, 208),  # socketpair stays allowed, and its buffers could be enlarged
}
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
ALWAYS = {
    # Other mounts, roots, namespaces and processes.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # Parts of the kernel that ordinary programs do not need.
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "bpf": (321, 280),
    "perf_event_open": (298, 241), "personality": (135, 92), "syslog": (103, 116), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "fanotify_init": (300, 262),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # Memory that no limit counts: of System V, of attributes and of landlock rules.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mq_open": (240, 180),
    "msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    # A pipe keeps whole pages that no process maps any more.
    "sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
}  # fmt: skip
# Numbers of a call on both machines, index of an argument, and its refused bits.
BITS = {
    "clone": ((56, 220), 0, 0x7E020000),  # any new namespace
    "mmap": ((9, 222), 3, 0x40001),  # MAP_SHARED and MAP_HUGETLB: pages that are not counted as resident memory
}
# The same, with refused values.
FCNTL = {
    "F_SETOWN": 8,  # these three can send any signal to any process of the user
    "F_SETSIG": 10,
    "F_SETOWN_EX": 15,
    "F_SETPIPE_SZ": 1031,
}
VALUES = {"fcntl": ((72, 25), 1, FCNTL)}
CLONE3 = 435
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
FIRST_X32_CALL = 0x40000000
FIRST_OTHER_FAMILY = 17  # AF_PACKET; AF_ALG, AF_VSOCK and others follow, and reach the kernel or the host

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, ARGUMENT_BYTES = 0, 4, 16, 8


def system_call_filter(*, network: Literal["deny", "allow", "gateway"], allows_signals: bool) -> bytes:
    """Return a filter that refuses calls with EPERM, and kills a process that calls as another architecture.

    Args:
        network: "deny" refuses `socket` for every family, "gateway" for families that network namespaces do not
            isolate.
        allows_signals: False refuses to send signals, for levels that could reach other processes of the user.

    Returns:
        Instructions of 8 bytes each; empty on machines other than x86_64 and aarch64.
    """
    if platform.machine() not in MACHINES:
        return b""
    column, architecture = MACHINES[platform.machine()]
    refused = {**ALWAYS, **(SOCKETS if network == "deny" else {}), **({} if allows_signals else SIGNALS)}
    numbers = [one[column] for one in refused.values()]
    return b"".join(_instructions(numbers, column, architecture, is_within=network == "gateway"))


def _instructions(refused: Iterable[int], column: int, architecture: int, *, is_within: bool) -> Iterable[bytes]:
    yield _instruction(LOAD, ARCHITECTURE)
    yield _instruction(EQUAL, architecture, if_true=1)
    yield _instruction(RETURN, KILL)
    yield _instruction(LOAD, NUMBER)
    yield _instruction(AT_LEAST, FIRST_X32_CALL, if_false=1)
    yield _instruction(RETURN, KILL)
    for number in refused:
        yield _instruction(EQUAL, number, if_false=1)
        yield _instruction(RETURN, REFUSE | errno.EPERM)
    yield _instruction(EQUAL, CLONE3, if_false=1)  # a filter cannot see its flags; C libraries fall back to clone
    yield _instruction(RETURN, REFUSE | errno.ENOSYS)
    if is_within:
        test = _instruction(AT_LEAST, FIRST_OTHER_FAMILY, if_false=1)
        yield from _refuse_argument(SOCKETS["socket"][column], 0, [test])
    for numbers, argument, bits in BITS.values():
        yield from _refuse_argument(numbers[column], argument, [_instruction(ANY_BIT, bits, if_false=1)])
    for numbers, argument, values in VALUES.values():
        tests = [_instruction(EQUAL, value, if_false=1) for value in values.values()]
        yield from _refuse_argument(numbers[column], argument, tests)
    yield _instruction(RETURN, ALLOW)


def _refuse_argument(number: int, argument: int, tests: list[bytes]) -> Iterable[bytes]:
    """Refuse one call if a test of the lower half of an argument holds. Other calls keep their number loaded."""
    yield _instruction(EQUAL, number, if_false=2 + 2 * len(tests))
    yield _instruction(LOAD, FIRST_ARGUMENT + ARGUMENT_BYTES * argument)
    for test in tests:
        yield test
        yield _instruction(RETURN, REFUSE | errno.EPERM)
    yield _instruction(RETURN, ALLOW)


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
