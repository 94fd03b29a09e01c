"""One process behind walls: namespaces, a read-only root, an unprivileged user, limits and a system-call filter.

`enter` is called in a freshly forked process and returns the list of walls that stand; `become_init` then forks the
first process of the new process namespace, in which model-written code is run. What a wall needs and this machine refuses is
left out and named, never silently: `WALLS` minus the returned set is what is *not* covered.

Linux only; the standard library and libc, nothing else. Order matters and is commented where it does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sysconfig
from dataclasses import dataclass

from eval import seccomp

WALLS = ("network", "filesystem", "processes", "unprivileged", "syscalls")

PLANS = ("full", "no_mounts", "limits_only")
"""From the strongest to the weakest; a weaker one is used in mode best_effort only, and named in every metric."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one problem may use. memory_gib and processes bound each problem; tmp_mib is its whole writable disk.

    wall_seconds bounds the whole problem from outside, whatever the code does; cpu_seconds each of its processes.
    """

    memory_gib: float = 4.0
    processes: int = 16
    file_mib: int = 16
    tmp_mib: int = 64
    open_files: int = 64
    cpu_seconds: int = 190
    wall_seconds: float = 200.0


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = (source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())
    _check(_libc.mount(*encoded[:3], ctypes.c_ulong(encoded[3]), encoded[4]), f"mount {target}")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """When the parent dies, by whatever signal, this process gets `by`. Cleared by a change of user: call it after."""
    prctl(_PR_SET_PDEATHSIG, by)


def readable_paths() -> list[str]:
    """What the code may read: the interpreter's libraries, installed packages, shared libraries. No home, no repository."""
    paths = sysconfig.get_paths()
    wanted = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], sysconfig.get_config_var("LIBDIR") or ""]
    wanted += ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    existing = {os.path.abspath(p) for p in wanted if p and os.path.exists(p)}
    return sorted(p for p in existing if not any(p != q and p.startswith(q + "/") for q in existing))


def enter(root: str, limits: Limits, slot: int, plan: str) -> set[str]:
    """Puts up the walls of `plan` around the calling process and its children to be. Returns those standing.

    root: an empty folder to mount the new file tree on; slot: a number of its own for each problem.
    The process namespace and the remaining walls (`unprivileged`, `syscalls`) are completed by `become_init`.
    Raises OSError when this machine does not allow what the plan needs: the caller tries the next plan.
    """
    os.setsid()
    os.umask(0o022)
    standing: set[str] = set()
    if plan != "limits_only":
        standing = _enter_namespaces()
    if plan == "full":
        _new_root(root, limits)
        standing.add("filesystem")
    else:
        os.chdir(root)
    own_count = os.geteuid() == 0 or "user_namespace" in standing  # a user (or namespace) of its own counts its own processes
    _limit(limits, 0 if own_count else _processes_of_user())
    if _drop_user(slot, in_user_namespace="user_namespace" in standing):
        standing.add("unprivileged")
    return standing


def _enter_namespaces() -> set[str]:
    """As root: mount, process, network, ipc and host-name namespaces. Else the same inside a user namespace of one's own."""
    every = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    walls = {"network", "processes"}
    if uid == 0 and _libc.unshare(every) == 0:
        return walls
    _check(_libc.unshare(every | _NEWUSER), "a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)
    return walls | {"user_namespace"}


def _new_root(root: str, limits: Limits) -> None:
    """A tree of its own in memory: libraries bound read-only, a small /tmp, three devices; the old tree is detached."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    # First these, so that they do not cover an installation below /tmp.
    for place, size in (("/tmp", limits.tmp_mib), ("/dev/shm", 1)):
        os.makedirs(root + place, mode=0o755, exist_ok=True)
        _mount("tmpfs", root + place, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"size={size}m,nr_inodes=4096,mode=1777")
    for path in [*readable_paths(), "/dev/null", "/dev/zero", "/dev/urandom"]:
        _bind_read_only(path, root + path, device=path.startswith("/dev/"))
    os.mkdir(root + "/proc")
    with open("/proc/meminfo") as memory, open(root + "/proc/meminfo", "w") as copy:  # evalplus asks psutil for the total
        copy.write(memory.read())
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "detach the old root")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/tmp")


def _bind_read_only(source: str, target: str, device: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(os.path.realpath(source), target, None, _MS_BIND | _MS_REC)
    kept = os.statvfs(target).f_flag & 0x0C0E  # a user namespace may not clear nosuid, nodev, noexec, noatime, nodiratime
    if not device:
        kept |= _MS_NODEV
    _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


def _processes_of_user() -> int:
    """Threads that already run under this user: its process limit counts them, too."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
            count += len(os.listdir(entry.path + "/task"))
    return count


def _limit(limits: Limits, already_running: int) -> None:
    memory, file_size = int(limits.memory_gib * 2**30), limits.file_mib * 2**20
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: already_running + limits.processes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _drop_user(slot: int, in_user_namespace: bool) -> bool:
    """As root: another user for each problem, so that process counts are its own. Returns whether it is no longer root.

    The kernel counts processes a user over the whole machine: two evaluations at once must not meet in one user, or a fork bomb in one
    takes the processes of the other. So the number of the evaluation's own process is part of the user's.
    """
    if in_user_namespace or os.geteuid() != 0:
        return True
    if not readable_by_others(sysconfig.get_paths()["stdlib"]):  # another user could import nothing: every solution would fail
        return False
    for uid in (2_000_000_000 + (os.getppid() * 1000 + slot) % 100_000_000, 65534):
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return True
        except OSError:
            continue
    return False


def readable_by_others(folder: str) -> bool:
    """Whether any user may enter this folder: x for others all the way up."""
    steps = [folder]
    while steps[-1] != "/":
        steps.append(os.path.dirname(steps[-1]))
    return all(os.stat(step).st_mode & 0o001 for step in steps)


def become_init(standing: set[str]) -> set[str]:
    """Called in the first process of the new namespaces: gives up capabilities and installs the filter. Returns the walls.

    From here on the process cannot be traced or read by its children (not dumpable), which share its user.
    """
    die_with_parent()
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # refused for a plain user, who has none to lose
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    prctl(_PR_SET_DUMPABLE, 0)
    try:
        seccomp.install(_libc)
    except OSError:
        return standing
    return standing | {"syscalls"}


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
