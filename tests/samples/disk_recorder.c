// Records what a process asks of the disk below one folder, and fails chosen calls. Loaded by
// LD_PRELOAD; disk_record.py compiles it and reads the record.
//
// The record is a file of events, each a header and then the names and the bytes of the call. Calls
// are made one at a time, so the order of the events is the order in which the calls ended. Files
// are told apart by inode numbers. Without RECORDER_FOLDER nothing is recorded or failed.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// The same as _HEADER in disk_record.py.
struct event {
    char kind;     // w write, t truncate, s sync, c create, d mkdir, r rename, x exchange,
                   // u unlink or rmdir, p writable shared map, m mark
    char durable;  // a write is on the disk when the call ends (O_DSYNC)
    uint16_t name_length, other_length;
    uint16_t reserved;
    uint64_t inode;
    int64_t offset;  // or new length
    uint64_t length;
} __attribute__((packed));

static const char* folder;
static size_t folder_length;
static int record_fd = -1;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

// What is to fail; see recorder_fail.
static char fail_kinds[8];
static long fail_after, fail_times, n_failed;
static int fail_errno, fail_late;

__attribute__((constructor)) static void start(void) {
    folder = getenv("RECORDER_FOLDER");
    folder_length = folder ? strlen(folder) : 0;
    const char* path = getenv("RECORDER_FILE");
    if (folder && path) {
        record_fd = (int)syscall(SYS_openat, AT_FDCWD, path,
                                 O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
}

static void put(const void* bytes, size_t length) {
    while (length > 0) {
        ssize_t written = syscall(SYS_write, record_fd, bytes, length);
        if (written <= 0) abort();
        bytes = (const char*)bytes + written;
        length -= (size_t)written;
    }
}

static void note(char kind, int durable, const char* name, const char* other, uint64_t inode,
                 int64_t offset, const struct iovec* parts, int n_parts, size_t length) {
    if (record_fd < 0) return;
    struct event event = {.kind = kind, .durable = (char)durable, .inode = inode};
    event.name_length = (uint16_t)strlen(name);
    event.other_length = (uint16_t)strlen(other);
    event.offset = offset;
    event.length = length;
    put(&event, sizeof event);
    put(name, event.name_length);
    put(other, event.other_length);
    for (int i = 0; i < n_parts && length > 0; i++) {
        size_t part = parts[i].iov_len < length ? parts[i].iov_len : length;
        put(parts[i].iov_base, part);
        length -= part;
    }
}

static int inside(const char* path) {
    return folder && strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == 0);
}

static int is_folder(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}

static uint64_t inode_of(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 ? (uint64_t)info.st_ino : 0;
}

// The name of an open file; whether it lies in the folder.
static int find(int fd, char name[PATH_MAX]) {
    if (!folder || fd < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, PATH_MAX - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return inside(name);
}

// The full name of a path that is given relative to an open folder; whether it lies in the folder.
static int resolve(int at, const char* path, char name[PATH_MAX]) {
    if (!folder || !path) return 0;
    if (path[0] == '/') {
        snprintf(name, PATH_MAX, "%s", path);
        return inside(name);
    }
    char base[PATH_MAX];
    if (at == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    if (strlen(base) + strlen(path) + 2 > PATH_MAX) return 0;
    strcpy(name, base);
    strcat(strcat(name, "/"), path);
    return inside(name);
}

// Whether this call is to fail.
static int fails(char kind) {
    if (!strchr(fail_kinds, kind) || fail_times == 0) return 0;
    if (fail_after > 0) {
        fail_after--;
        return 0;
    }
    if (fail_times > 0) fail_times--;
    n_failed++;
    return 1;
}

// Makes calls of some kinds fail: `w` writes, `m` writes through O_DSYNC, `s` syncs, `t` changes of
// length, `n` names. The first `after` calls pass, then `times` of them fail, all if negative.
// If `late`, the call is made and fails afterwards, as when a flush finds a broken disk; a write
// that does not go through O_DSYNC writes half of it, as on a disk that becomes full.
void recorder_fail(const char* kinds, long after, long times, int error, int late) {
    pthread_mutex_lock(&lock);
    snprintf(fail_kinds, sizeof fail_kinds, "%s", kinds);
    fail_after = after;
    fail_times = times;
    fail_errno = error;
    fail_late = late;
    n_failed = 0;
    pthread_mutex_unlock(&lock);
}

// How many calls have failed since recorder_fail.
long recorder_failed(void) {
    return n_failed;
}

// Puts a mark into the record.
void recorder_mark(const char* text) {
    struct iovec part = {(void*)text, strlen(text)};
    pthread_mutex_lock(&lock);
    note('m', 0, "", "", 0, 0, &part, 1, part.iov_len);
    pthread_mutex_unlock(&lock);
}

static int write_failed(void) {
    errno = fail_errno;
    return -1;
}

// `offset` is -1 for writes at the position of the descriptor.
static ssize_t do_write(int fd, const struct iovec* parts, int n_parts, off_t offset) {
    char name[PATH_MAX];
    size_t length = 0;
    for (int i = 0; i < n_parts; i++) length += parts[i].iov_len;
    pthread_mutex_lock(&lock);
    int ours = find(fd, name);
    int flags = ours ? fcntl(fd, F_GETFL) : 0;
    int durable = ours && (flags & O_DSYNC) != 0;
    int fail = ours && fails(durable ? 'm' : 'w');
    struct iovec half = {parts->iov_base, parts->iov_len / 2};
    if (fail && fail_late && !durable) parts = &half, n_parts = 1;
    off_t at = offset;
    ssize_t written = -1;
    if (fail && !fail_late) {
        errno = fail_errno;
    } else if (offset >= 0) {
        written = syscall(SYS_pwritev, fd, parts, n_parts, offset, 0);
    } else {
        written = syscall(SYS_writev, fd, parts, n_parts);
        if (ours && written >= 0) at = lseek(fd, 0, SEEK_CUR) - written;
    }
    int error = errno;
    if (ours && written > 0) {
        note('w', durable && !fail, name, "", inode_of(fd), at, parts, n_parts, (size_t)written);
    }
    if (fail && durable) written = write_failed(), error = fail_errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return written;
}

ssize_t write(int fd, const void* bytes, size_t length) {
    struct iovec part = {(void*)bytes, length};
    if (!folder) return syscall(SYS_write, fd, bytes, length);
    return do_write(fd, &part, 1, -1);
}

ssize_t pwrite(int fd, const void* bytes, size_t length, off_t offset) {
    struct iovec part = {(void*)bytes, length};
    return do_write(fd, &part, 1, offset);
}

ssize_t pwrite64(int fd, const void* bytes, size_t length, off_t offset) {
    return pwrite(fd, bytes, length, offset);
}

ssize_t writev(int fd, const struct iovec* parts, int n_parts) {
    return do_write(fd, parts, n_parts, -1);
}

ssize_t pwritev(int fd, const struct iovec* parts, int n_parts, off_t offset) {
    return do_write(fd, parts, n_parts, offset);
}

ssize_t pwritev64(int fd, const struct iovec* parts, int n_parts, off_t offset) {
    return do_write(fd, parts, n_parts, offset);
}

// Flags only say how to wait, so they are left out.
ssize_t pwritev2(int fd, const struct iovec* parts, int n_parts, off_t offset, int flags) {
    (void)flags;
    return do_write(fd, parts, n_parts, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec* parts, int n_parts, off_t offset, int flags) {
    return pwritev2(fd, parts, n_parts, offset, flags);
}

int ftruncate(int fd, off_t length) {
    char name[PATH_MAX];
    pthread_mutex_lock(&lock);
    int ours = find(fd, name);
    int result = ours && fails('t') ? write_failed() : (int)syscall(SYS_ftruncate, fd, length);
    int error = errno;
    if (ours && result == 0) note('t', 0, name, "", inode_of(fd), length, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int ftruncate64(int fd, off_t length) {
    return ftruncate(fd, length);
}

static int do_sync(int fd, long call) {
    char name[PATH_MAX];
    pthread_mutex_lock(&lock);
    int ours = find(fd, name);
    int result = ours && fails('s') ? write_failed() : (int)syscall(call, fd);
    int error = errno;
    if (ours && result == 0) note('s', is_folder(fd), name, "", inode_of(fd), 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int fsync(int fd) {
    return do_sync(fd, SYS_fsync);
}

int fdatasync(int fd) {
    return do_sync(fd, SYS_fdatasync);
}

static int do_open(int at, const char* path, int flags, mode_t mode) {
    char name[PATH_MAX];
    struct stat before;
    pthread_mutex_lock(&lock);
    int ours = resolve(at, path, name);
    int creates = ours && (flags & O_CREAT) && fstatat(at, path, &before, 0) != 0;
    int fd =
        creates && fails('n') ? write_failed() : (int)syscall(SYS_openat, at, path, flags, mode);
    int error = errno;
    if (fd >= 0 && creates) note('c', 0, name, "", inode_of(fd), 0, NULL, 0, 0);
    if (fd >= 0 && ours && (flags & O_TRUNC)) note('t', 0, name, "", inode_of(fd), 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

static mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | __O_TMPFILE) ? (mode_t)va_arg(arguments, int) : 0;
}

#define OPEN(name)                                   \
    int name(const char* path, int flags, ...) {     \
        va_list arguments;                           \
        va_start(arguments, flags);                  \
        mode_t mode = mode_of(flags, arguments);     \
        va_end(arguments);                           \
        return do_open(AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(name)                                     \
    int name(int at, const char* path, int flags, ...) { \
        va_list arguments;                               \
        va_start(arguments, flags);                      \
        mode_t mode = mode_of(flags, arguments);         \
        va_end(arguments);                               \
        return do_open(at, path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

static int do_rename(int at, const char* from, int to_at, const char* to, unsigned flags) {
    char old[PATH_MAX], new[PATH_MAX];
    pthread_mutex_lock(&lock);
    int old_ours = resolve(at, from, old), new_ours = resolve(to_at, to, new);
    int ours = old_ours && new_ours;
    int result = ours && fails('n') ? write_failed()
                                    : (int)syscall(SYS_renameat2, at, from, to_at, to, flags);
    int error = errno;
    if (result == 0 && ours) {
        note(flags & RENAME_EXCHANGE ? 'x' : 'r', 0, old, new, 0, 0, NULL, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int rename(const char* from, const char* to) {
    return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat(int at, const char* from, int to_at, const char* to) {
    return do_rename(at, from, to_at, to, 0);
}

int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) {
    return do_rename(at, from, to_at, to, flags);
}

static int do_name(char kind, int at, const char* path, long call, long argument) {
    char name[PATH_MAX];
    pthread_mutex_lock(&lock);
    int ours = resolve(at, path, name);
    int result = ours && fails('n') ? write_failed() : (int)syscall(call, at, path, argument);
    int error = errno;
    if (result == 0 && ours) note(kind, 0, name, "", 0, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int unlink(const char* path) {
    return do_name('u', AT_FDCWD, path, SYS_unlinkat, 0);
}

int unlinkat(int at, const char* path, int flags) {
    return do_name('u', at, path, SYS_unlinkat, flags);
}

int rmdir(const char* path) {
    return do_name('u', AT_FDCWD, path, SYS_unlinkat, AT_REMOVEDIR);
}

int mkdir(const char* path, mode_t mode) {
    return do_name('d', AT_FDCWD, path, SYS_mkdirat, (long)mode);
}

int mkdirat(int at, const char* path, mode_t mode) {
    return do_name('d', at, path, SYS_mkdirat, (long)mode);
}

// Bytes that go through a writable map never come past here, so the reader must know of it.
void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
    char name[PATH_MAX];
    if ((protection & PROT_WRITE) && (flags & MAP_SHARED) && find(fd, name)) {
        pthread_mutex_lock(&lock);
        note('p', 0, name, "", inode_of(fd), 0, NULL, 0, 0);
        pthread_mutex_unlock(&lock);
    }
    return (void*)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

void* mmap64(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap(address, length, protection, flags, fd, offset);
}
