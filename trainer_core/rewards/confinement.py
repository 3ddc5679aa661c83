"""Locks the current process in: resource limits, no privileges, files by Landlock, system calls by seccomp.

Plain ctypes, since the Python packages for it are stale. Each step that the kernel does not offer is left out and missing
from the level returned. What holds everywhere: limits, a process of its own, and a parent that kills it at the deadline.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LIBC = ctypes.CDLL(None, use_errno=True)

# Landlock (include/uapi/linux/landlock.h): rights by ABI version
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)
_RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}

# seccomp: classic BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD = 0x00010000
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442,
}  # fmt: skip
_DENIED = {
    "x86_64": {
        **_COMMON, "shmget": 29, "shmat": 30, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "fork": 57,
        "vfork": 58, "execve": 59, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "rt_sigqueueinfo": 129,
        "personality": 135, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "tkill": 200, "clock_settime": 227,
        "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "accept4": 288,
        "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "execveat": 322, "userfaultfd": 323,
    },
    "aarch64": {
        **_COMMON, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
        "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116,
        "ptrace": 117, "tkill": 130, "rt_sigqueueinfo": 138, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196,
        "socket": 198, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "add_key": 217, "request_key": 218,
        "keyctl": 219, "execve": 221, "swapon": 224, "swapoff": 225, "rt_tgsigqueueinfo": 240, "perf_event_open": 241,
        "accept4": 242, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "execveat": 281,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_CHECKED = {
    "x86_64": {"clone": 56, "kill": 62, "prctl": 157, "tgkill": 234, "prlimit64": 302, "clone3": 435},
    "aarch64": {"kill": 129, "tgkill": 131, "prctl": 167, "clone": 220, "prlimit64": 261, "clone3": 435},
}

READABLE_FILES = (
    "/etc/ld.so.cache", "/etc/localtime", "/etc/os-release", "/etc/mime.types", "/dev/urandom", "/dev/random", "/dev/zero",
    "/proc/cpuinfo", "/proc/meminfo",
)  # fmt: skip
READABLE_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sys/devices/system/cpu")


def limit_resources(*, memory_bytes: int, cpu_s: int, file_bytes: int, open_files: int, processes: int) -> None:
    """Hard limits of this process; none can be raised again without privileges."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def confine(folder: Path, package: Path, parent_pid: int) -> list[str]:
    """Give up privileges, files and system calls for good; returns the steps that took hold, in order.

    `folder` stays writable, `package` readable. Call it with one thread, after everything that needs more was done.
    """
    level = ["own uid"] if _drop_user(folder, package) else []
    # Set after the change of user, which clears it.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    private = _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if private and _landlock(folder, package):
        level.append("landlock")
    _drop_capabilities()
    if private and _seccomp():
        level.append("seccomp")
    return level


def _drop_user(folder: Path, package: Path) -> bool:
    """As root, become a user of this process's own, if what Python imports from can be read by anyone."""
    if os.geteuid() != 0:
        return False
    needed = [Path(sys.base_prefix), Path(sys.prefix), package, folder.parent]
    if not all(_open_to_all(path) for path in needed):
        return False
    user = 61184 + os.getpid() % 4336  # a range that systemd keeps for users that exist only while they are used
    os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    return True


def _open_to_all(path: Path) -> bool:
    path = path.resolve()
    wanted = stat.S_IROTH | stat.S_IXOTH
    passable = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    return passable and path.stat().st_mode & wanted == wanted


def _drop_capabilities() -> None:
    """Without this a root process could undo its limits."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _LIBC.capset(header, (ctypes.c_uint32 * 6)())


def _landlock(folder: Path, package: Path) -> bool:
    """Only interpreter, libraries and `package` can be read, only `folder` written; no TCP, no signals to others."""
    abi = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    handled = _RIGHTS_OF_ABI[min(abi, 5)]
    attributes = struct.pack("<QQQ", handled, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    read = _READ_FILE | _READ_DIR | _EXECUTE
    folders = {*READABLE_FOLDERS, sys.base_prefix, sys.prefix, str(package)}
    rules = [*_rules(folders, read), *_rules(READABLE_FILES, read), *_rules(["/dev/null"], read | _WRITE_FILE)]
    for path, rights in [*rules, (str(folder), handled & ~_EXECUTE)]:
        _allow(ruleset, path, rights & handled)
    restricted = _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def _rules(paths: Iterable[str], rights: int) -> list[tuple[str, int]]:
    return [(path, rights) for path in paths if os.path.exists(path)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _FILE_RIGHTS
    _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", rights, descriptor), 0)
    os.close(descriptor)


def _seccomp() -> bool:
    """No sockets, no other processes (threads are fine), no signals to others, no mounts, keys, tracing, io_uring."""
    machine = platform.machine()
    if machine not in _ARCHES or sys.byteorder != "little":
        return False
    program = _filter(machine, os.getpid())
    instructions = (ctypes.c_uint64 * len(program))(*(struct.unpack("<Q", instruction)[0] for instruction in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    prepared = Program(len(program), ctypes.cast(instructions, ctypes.c_void_p))
    return _LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(prepared), 0, 0) == 0


def _filter(machine: str, pid: int) -> list[bytes]:
    def op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, true, false, value)

    deny = op(_RETURN, _ERRNO | errno.EPERM)
    allow = op(_RETURN, _ALLOW)
    number, argument = op(_LOAD, 0), op(_LOAD, 16)
    calls = _CHECKED[machine]
    program = [op(_LOAD, 4), op(_JUMP_EQUAL, _ARCHES[machine], 1, 0), op(_RETURN, _KILL), number]
    if machine == "x86_64":  # the x32 numbering would get around every check below
        program += [op(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1), deny]
    for denied in sorted(_DENIED[machine].values()):
        program += [op(_JUMP_EQUAL, denied, 0, 1), deny]
    # The C library falls back to clone, whose flags can be looked at, when clone3 does not exist.
    program += [op(_JUMP_EQUAL, calls["clone3"], 0, 1), op(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [op(_JUMP_EQUAL, calls["clone"], 0, 4), argument, op(_JUMP_SET, _CLONE_THREAD, 1, 0), deny, allow]
    for name in ("kill", "tgkill"):
        program += [op(_JUMP_EQUAL, calls[name], 0, 4), argument, op(_JUMP_EQUAL, pid, 1, 0), deny, allow]
    own = [argument, op(_JUMP_EQUAL, 0, 2, 0), op(_JUMP_EQUAL, pid, 1, 0), deny, allow]
    program += [op(_JUMP_EQUAL, calls["prlimit64"], 0, 5), *own]
    protected = [argument, op(_JUMP_EQUAL, _PR_SET_PDEATHSIG, 0, 1), deny, allow]
    program += [op(_JUMP_EQUAL, calls["prctl"], 0, 4), *protected]
    return [*program, allow]
