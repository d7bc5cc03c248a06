"""Limits that the kernel enforces on the snippet's process (Linux on x86-64 and ARM-64); the process asks for them.

snippet_process.py imports it in an interpreter without lmgym and site-packages, so it uses only the standard library.
Each function returns True if the kernel agreed, and False instead of an error if it did not.

- `namespaces`: separate user, mount, network and IPC namespaces; the working folder becomes a file system in memory of
  limited size, which ends with the process.
- `landlock`: files outside of the named folders can be neither opened nor listed; no TCP, no signals to other processes
  (kernel documentation, userspace-api/landlock).
- `system_calls`: an allow-list (seccomp). Forbidden are new processes and threads, starting programs, sockets, signals,
  mounts, and changes of owners or permissions."""

import ctypes
import os
import struct
from collections.abc import Sequence

NEW_USER, NEW_MOUNTS, NEW_NETWORK, NEW_IPC = 0x10000000, 0x00020000, 0x40000000, 0x08000000
RECURSIVE_PRIVATE = 0x4000 | 0x40000
NO_SUID_DEVICES_PROGRAMS = 0x2 | 0x4 | 0x8
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, SECCOMP_FILTER, SET_PARENT_DEATH_SIGNAL = 38, 22, 2, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
FOLDER_RIGHTS = 0b110_0001_1011_1110  # all but running programs, and making devices, sockets, pipes and links
LOAD, JUMP_IF_EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06  # of the kernel's packet-filter language
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # refused calls fail with EPERM
TRUNCATE_READ_ONLY = 0x200, 0x203  # O_RDONLY | O_TRUNC empties a file; early Landlock versions allow it

# Name: number on x86-64, number on ARM-64 (None: it has no such call).
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "readv": (19, 65),
    "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223),
    "copy_file_range": (326, 285), "sendfile": (40, 71), "umask": (95, 166), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "times": (100, 153), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None),
    "futex": (202, 98), "getrandom": (318, 278), "restart_syscall": (219, 128), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
OPENS = {"open": ((2, None), 1), "openat": ((257, 56), 2)}  # then the position of the flags among the arguments
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column of the table


def namespaces(folder: str, mebibytes: int) -> bool:
    """Leave the machine's network, mounts and shared memory; mount a file system of this size on the folder."""
    user, group = os.getuid(), os.getgid()
    libc = _libc()
    if libc is None or libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_IPC):
        return False
    # The process keeps its user and group numbers in the new namespace.
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError:
        return False
    # Mounts from here on stay invisible to the rest of the machine.
    if libc.mount(b"none", b"/", None, RECURSIVE_PRIVATE, None):
        return False
    options = f"size={mebibytes}m,nr_inodes=1000,mode=700".encode()
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", NO_SUID_DEVICES_PROGRAMS, options):
        return False
    os.chdir(folder)
    return True


def landlock(folder: str, readable: Sequence[str], hidden: Sequence[str]) -> bool:
    """From now on only `folder` can be written to, and only that and `readable` (files and folders) can be read, except
    the folders `hidden` in them."""
    libc = _libc()
    if libc is None or libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    # Each version of Landlock knows more rights, and a longer structure.
    rights = (1 << min(12 + version, 15 if version < 5 else 16)) - 1
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    # Grant the snippet's folder and the readable paths; everything else is refused.
    granted = [(folder, FOLDER_RIGHTS & rights)]
    shown = [path for root in readable for path in without(root, hidden)]
    granted += [(path, READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE) for path in shown]
    for path, access in granted:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            continue
        failed = libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, descriptor), 0)
        os.close(descriptor)
        if failed:
            return False
    done: bool = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


def without(path: str, hidden: Sequence[str]) -> list[str]:
    """Paths that together are all of `path` except the folders `hidden`: Landlock can grant a folder, but not a part of
    it. A folder with a hidden one in it cannot be listed then. Links are left out; what they lead to counts.

    Example: without("/usr/lib/python3", ["/usr/lib/python3/dist-packages"]) -> ["/usr/lib/python3/debian_bundle"]"""
    inner = [other for other in hidden if other.startswith(f"{path}/")]
    if path in hidden or not inner:
        return [] if path in hidden else [path]
    with os.scandir(path) as entries:
        return [part for entry in entries if not entry.is_symlink() for part in without(entry.path, inner)]


def system_calls() -> bool:
    """Give up all capabilities, then all system calls that are not in the table."""
    libc, machine = _libc(), MACHINES.get(os.uname().machine)
    if libc is None or machine is None or struct.calcsize("P") != 8:
        return False
    if libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) or libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    program = _program(*machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    done: bool = libc.prctl(SET_SECCOMP, SECCOMP_FILTER, header, 0, 0) == 0
    return done


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    libc = _libc()
    if libc is not None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, 9, 0, 0, 0)


def _program(architecture: int, column: int) -> bytes:
    """The seccomp filter: instructions of 8 bytes for the kernel's packet-filter machine."""

    def line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    # Refuse calls of another architecture: their numbers mean other calls. Then load the number of the call.
    program = [line(LOAD, 4), line(JUMP_IF_EQUAL, architecture, 1), line(RETURN, REFUSE), line(LOAD, 0)]
    for numbers in CALLS.values():
        if numbers[column] is not None:
            program += [line(JUMP_IF_EQUAL, numbers[column] or 0, 0, 1), line(RETURN, ALLOW)]
    # An open is allowed unless its flags would empty the file.
    flag, mask = TRUNCATE_READ_ONLY
    for numbers, index in OPENS.values():
        if numbers[column] is not None:
            program += [line(JUMP_IF_EQUAL, numbers[column] or 0, 0, 5), line(LOAD, 16 + 8 * index), line(AND, mask)]
            program += [line(JUMP_IF_EQUAL, flag, 0, 1), line(RETURN, REFUSE), line(RETURN, ALLOW)]
    return b"".join([*program, line(RETURN, REFUSE)])


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if hasattr(libc, "unshare") and hasattr(libc, "prctl") else None
    except OSError:
        return None
