/* Preloaded (LD_PRELOAD), it counts the calls by which a process changes files below one folder, writes them to a log,
 * and lets the n-th of them fail. Python, Rust and C++ all come through here; the one call that safetensors makes without
 * libc, renameat, is trapped by a seccomp filter and handled as the others.
 *
 * A record of the log: op, length of the first path, length of what follows it, a number; a newline; both texts.
 *   C path           created or emptied (number: 1 if emptied)      R path path   renamed
 *   W path data      written at the offset `number`                 U path        unlinked
 *   T path           cut or grown to `number` bytes                 D path        folder removed
 *   S path           flushed                                        M path        folder made
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length = 0; /* 0: not armed */
static atomic_long count = 0;
static long fails_at = 0;  /* 0: never */
static int fails_with = 0; /* an errno */
static int stays_full = 0; /* whatever needs space fails from then on */
static int log_file = -1;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__) = NULL; \
    if (real == NULL) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int is_below(const char *path) {
    return folder_length != 0 && strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == 0);
}

/* The absolute path of `name` below the open folder `at`; 0 if it is not one that counts. */
static int path_at(int at, const char *name, char *path) {
    if (folder_length == 0 || name == NULL) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return is_below(path);
    }
    char link[64], base[PATH_MAX];
    ssize_t length;
    if (at == AT_FDCWD) {
        if (getcwd(base, sizeof base) == NULL) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    return is_below(path);
}

static int path_of(int file, char *path) {
    if (folder_length == 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* Count a call; 1 if it has to fail. */
static int fails(int needs_space) {
    long now = atomic_fetch_add(&count, 1) + 1;
    if (fails_at == 0 || now < fails_at) return 0;
    if (now > fails_at && !(stays_full && needs_space)) return 0;
    errno = fails_with;
    return 1;
}

static void put(char op, const char *path, const void *data, size_t length, long number) {
    if (log_file < 0) return;
    REAL(ssize_t, "write", int, const void *, size_t);
    int before = errno;
    char head[64];
    int size = snprintf(head, sizeof head, "%c %zu %zu %ld\n", op, strlen(path), length, number);
    if (real(log_file, head, size) < 0 || real(log_file, path, strlen(path)) < 0) abort();
    if (length && real(log_file, data, length) < 0) abort();
    errno = before;
}

static int opened(int at, const char *name, int flags, mode_t mode, const char *symbol) {
    int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, symbol);
    char path[PATH_MAX];
    int counts = (flags & (O_CREAT | O_TRUNC)) && path_at(at, name, path);
    if (counts && fails(1)) return -1;
    int file = real(at, name, flags, mode);
    if (counts && file >= 0) put('C', path, NULL, 0, (flags & O_TRUNC) != 0);
    return file;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode, "openat"); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode, "openat64"); }
int openat(int at, const char *name, int flags, ...) { MODE return opened(at, name, flags, mode, "openat"); }
int openat64(int at, const char *name, int flags, ...) { MODE return opened(at, name, flags, mode, "openat64"); }
int creat(const char *name, mode_t mode) {
    return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode, "openat");
}

ssize_t write(int file, const void *data, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[PATH_MAX];
    int counts = path_of(file, path);
    if (counts && fails(1)) return -1;
    struct stat status;
    long offset = 0;
    if (counts)
        offset = (fcntl(file, F_GETFL) & O_APPEND) && fstat(file, &status) == 0 ? status.st_size : lseek(file, 0, SEEK_CUR);
    ssize_t written = real(file, data, length);
    if (counts && written > 0) put('W', path, data, written, offset);
    return written;
}

static ssize_t write_at(int file, const void *data, size_t length, off_t offset) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    char path[PATH_MAX];
    int counts = path_of(file, path);
    if (counts && fails(1)) return -1;
    ssize_t written = real(file, data, length, offset);
    if (counts && written > 0) put('W', path, data, written, offset);
    return written;
}

ssize_t pwrite(int file, const void *data, size_t length, off_t offset) { return write_at(file, data, length, offset); }
ssize_t pwrite64(int file, const void *data, size_t length, off_t offset) { return write_at(file, data, length, offset); }

ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    char path[PATH_MAX];
    if (!path_of(file, path)) return real(file, parts, number);
    ssize_t all = 0; /* part by part, so that each is a call of its own in the log */
    for (int part = 0; part < number; part++) {
        ssize_t written = write(file, parts[part].iov_base, parts[part].iov_len);
        if (written < 0) return all ? all : -1;
        all += written;
        if ((size_t)written < parts[part].iov_len) break;
    }
    return all;
}

static int cut(int file, off_t length) {
    REAL(int, "ftruncate64", int, off_t);
    char path[PATH_MAX];
    int counts = path_of(file, path);
    if (counts && fails(1)) return -1;
    int status = real(file, length);
    if (counts && status == 0) put('T', path, NULL, 0, length);
    return status;
}

int ftruncate(int file, off_t length) { return cut(file, length); }
int ftruncate64(int file, off_t length) { return cut(file, length); }

static int flushed(int file, const char *symbol) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, symbol);
    char path[PATH_MAX];
    int counts = path_of(file, path);
    if (counts && fails(0)) return -1;
    int status = real(file);
    if (counts && status == 0) put('S', path, NULL, 0, 0);
    return status;
}

int fsync(int file) { return flushed(file, "fsync"); }
int fdatasync(int file) { return flushed(file, "fdatasync"); }

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    char one[PATH_MAX], other[PATH_MAX];
    int counts = path_at(from_at, from, one) && path_at(to_at, to, other);
    if (counts && fails(0)) return -1;
    int status = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags); /* libc's own takes renameat */
    if (counts && status == 0) put('R', one, other, strlen(other), 0);
    return status;
}

int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return renameat2(from_at, from, to_at, to, 0); }

int unlinkat(int at, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[PATH_MAX];
    int counts = path_at(at, name, path);
    if (counts && fails(0)) return -1;
    int status = real(at, name, flags);
    if (counts && status == 0) put(flags & AT_REMOVEDIR ? 'D' : 'U', path, NULL, 0, 0);
    return status;
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int at, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    char path[PATH_MAX];
    int counts = path_at(at, name, path);
    if (counts && fails(1)) return -1;
    int status = real(at, name, mode);
    if (counts && status == 0) put('M', path, NULL, 0, 0);
    return status;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* renameat by number, not by name: do it by renameat2, which the filter lets pass. */
static void trapped(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int status = renameat2((int)registers[REG_RDI], (const char *)registers[REG_RSI], (int)registers[REG_RDX],
                           (const char *)registers[REG_R10], 0);
    registers[REG_RAX] = status == 0 ? 0 : -errno;
}

void io_arm(const char *path, long n, int error, int stays, const char *log) {
    snprintf(folder, sizeof folder, "%s", path);
    count = 0;
    fails_at = n;
    fails_with = error;
    stays_full = stays;
    log_file = log == NULL ? -1 : open(log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    folder_length = strlen(folder);
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        abort();
}

