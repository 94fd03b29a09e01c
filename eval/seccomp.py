"""A system-call filter for model-written code: what it never needs is refused by the kernel.

In goes the machine's architecture; out comes a classic BPF programme that `install` loads into the calling process (for
good: it is inherited by every child). Refused calls return EPERM, so Python sees an ordinary PermissionError and the
problem simply fails. `clone3` returns ENOSYS instead: the C library then falls back to `clone`, whose flags a filter can
read.

Standard library only: the sandbox imports this file before anything else.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# System calls by name: (x86_64, aarch64); None where the architecture lacks it.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "personality": (135, 92),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "execve": (59, 221),
    "execveat": (322, 281),
}
_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000 | 0x02000000  # every CLONE_NEW* bit that clone() takes

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000


def program(machine: str | None = None) -> bytes:
    """The filter as an array of sock_filter. Raises OSError on an architecture whose call numbers are not listed here."""
    machine = machine or platform.machine()
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}; known: {', '.join(_ARCH)}")
    column, audit_arch = _ARCH[machine]
    lines = [(_LOAD, 0, 0, 4), (_JUMP_EQ, 1, 0, audit_arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":  # the x32 twin of each call has another number: refuse them all
        lines += [(_JUMP_GE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [(_JUMP_EQ, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            lines += [(_JUMP_EQ, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [
        (_JUMP_EQ, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),  # first argument, low word: the flags
        (_JUMP_SET, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install(libc: ctypes.CDLL) -> None:
    """Loads the filter into this process; needs no_new_privs or CAP_SYS_ADMIN. Raises OSError when the kernel refuses."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    pr_set_seccomp, filter_mode = 22, 2
    if libc.prctl(pr_set_seccomp, filter_mode, ctypes.c_char_p(header), 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refused the system-call filter: {errno.errorcode.get(code, code)}")
