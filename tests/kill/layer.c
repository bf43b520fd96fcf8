/* Between a process and its files: a library for LD_PRELOAD that ends the process before its n-th change of a file below
   a folder, or lets operations of a kind fail there. It sees the operations of Python and of all compiled code that
   calls the C library. Until layer_arm is called, it does nothing.

   Changes are of the kinds create (opening for writing), write, rename, unlink, mkdir and chmod. Other kinds, which
   change nothing that another process sees, are open (for reading), list and fsync. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static struct {
    char folder[PATH_MAX]; /* operations on paths that begin with this count; empty: none */
    long deadly;           /* the process ends before this change, from 1; 0: never */
    int torn;              /* if that is a write, in the middle of it */
    char kind[32];         /* operations of this kind fail ... */
    char part[256];        /* ... on paths that contain this ... */
    int error;             /* ... with this errno; 0: none */
    int log;               /* a file descriptor for a line "kind path" of each operation; -1: none */
} layer = {.log = -1};
static long counted; /* changes */

void layer_arm(const char *folder, long deadly, int torn, const char *kind, const char *part, int error, int log) {
    snprintf(layer.kind, sizeof layer.kind, "%s", kind);
    snprintf(layer.part, sizeof layer.part, "%s", part);
    layer.deadly = deadly, layer.torn = torn, layer.error = error, layer.log = log;
    snprintf(layer.folder, sizeof layer.folder, "%s", folder);
}

/* The next function of that name: the C library's. */
#define REAL(name)                                                                                                   \
    static __typeof__(name) *real;                                                                                   \
    if (!real)                                                                                                       \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void of_descriptor(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void of_name(int at, const char *name, char *path) {
    path[0] = 0;
    if (name[0] != '/') {
        if (at != AT_FDCWD)
            of_descriptor(at, path);
        else if (syscall(SYS_getcwd, path, PATH_MAX) < 0)
            path[0] = 0;
    }
    size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "%s%s", n ? "/" : "", name);
}

enum { GO, FAIL, HALF }; /* what an operation does: itself, nothing but errno, half of it before the end */

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;)
        pause();
}

static int see(const char *kind, const char *path) {
    if (!layer.folder[0] || strncmp(path, layer.folder, strlen(layer.folder)))
        return GO;
    int changes = strcmp(kind, "open") && strcmp(kind, "list") && strcmp(kind, "fsync");
    if (layer.log >= 0) {
        char line[PATH_MAX + 64];
        int n = snprintf(line, sizeof line, "%s %s\n", kind, path);
        syscall(SYS_write, layer.log, line, (size_t)n);
    }
    if (changes && __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST) == layer.deadly) {
        if (layer.torn && !strcmp(kind, "write"))
            return HALF;
        die();
    }
    if (layer.error && !strcmp(kind, layer.kind) && strstr(path, layer.part)) {
        errno = layer.error;
        return FAIL;
    }
    return GO;
}

static int named(const char *kind, int at, const char *name) {
    char path[PATH_MAX];
    if (!layer.folder[0])
        return GO;
    of_name(at, name, path);
    return see(kind, path);
}

static int described(const char *kind, int fd) {
    char path[PATH_MAX];
    if (!layer.folder[0])
        return GO;
    of_descriptor(fd, path);
    return see(kind, path);
}

/* ------------------------------------------------------------------------------------------- opening, listing */

#define OPENING(flags) ((flags) & (O_CREAT | O_TRUNC) ? "create" : "open")
#define OPEN(function)                                                                                               \
    int function(const char *name, int flags, ...) {                                                                 \
        REAL(function);                                                             \
        va_list more;                                                                                                \
        va_start(more, flags);                                                                                       \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;                                    \
        va_end(more);                                                                                                \
        return named(OPENING(flags), AT_FDCWD, name) == GO ? real(name, flags, mode) : -1;                                   \
    }
#define OPENAT(function)                                                                                             \
    int function(int at, const char *name, int flags, ...) {                                                         \
        REAL(function);                                                        \
        va_list more;                                                                                                \
        va_start(more, flags);                                                                                       \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;                                    \
        va_end(more);                                                                                                \
        return named(OPENING(flags), at, name) == GO ? real(at, name, flags, mode) : -1;                                     \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

FILE *fopen(const char *name, const char *mode) {
    REAL(fopen);
    return named(mode[0] == 'r' ? "open" : "create", AT_FDCWD, name) == GO ? real(name, mode) : NULL;
}
FILE *fopen64(const char *name, const char *mode) {
    REAL(fopen64);
    return named(mode[0] == 'r' ? "open" : "create", AT_FDCWD, name) == GO ? real(name, mode) : NULL;
}
DIR *opendir(const char *name) {
    REAL(opendir);
    return named("list", AT_FDCWD, name) == GO ? real(name) : NULL;
}
DIR *fdopendir(int fd) {
    REAL(fdopendir);
    return described("list", fd) == GO ? real(fd) : NULL;
}

/* --------------------------------------------------------------------------------------------------- writing */

ssize_t write(int fd, const void *content, size_t size) {
    REAL(write);
    int how = described("write", fd);
    if (how == HALF) {
        real(fd, content, size / 2);
        die();
    }
    return how == GO ? real(fd, content, size) : -1;
}
ssize_t pwrite64(int fd, const void *content, size_t size, off64_t at) {
    REAL(pwrite64);
    int how = described("write", fd);
    if (how == HALF) {
        real(fd, content, size / 2, at);
        die();
    }
    return how == GO ? real(fd, content, size, at) : -1;
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    int how = described("write", fd);
    if (how == HALF) {
        real(fd, parts, count / 2);
        die();
    }
    return how == GO ? real(fd, parts, count) : -1;
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    REAL(sendfile64);
    int how = described("write", to);
    if (how == HALF) {
        real(to, from, at, size / 2);
        die();
    }
    return how == GO ? real(to, from, at, size) : -1;
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    int how = described("write", fd);
    if (how == HALF) {
        real(fd, size / 2);
        die();
    }
    return how == GO ? real(fd, size) : -1;
}
int fsync(int fd) {
    REAL(fsync);
    return described("fsync", fd) == GO ? real(fd) : -1;
}

/* ------------------------------------------------------------------------------------------ names and modes */

int rename(const char *from, const char *to) {
    REAL(rename);
    return named("rename", AT_FDCWD, to) == GO ? real(from, to) : -1;
}
int renameat(int at, const char *from, int at_to, const char *to) {
    REAL(renameat);
    return named("rename", at_to, to) == GO ? real(at, from, at_to, to) : -1;
}
int unlink(const char *name) {
    REAL(unlink);
    return named("unlink", AT_FDCWD, name) == GO ? real(name) : -1;
}
int unlinkat(int at, const char *name, int flags) {
    REAL(unlinkat);
    return named("unlink", at, name) == GO ? real(at, name, flags) : -1;
}
int rmdir(const char *name) {
    REAL(rmdir);
    return named("unlink", AT_FDCWD, name) == GO ? real(name) : -1;
}
int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    return named("mkdir", AT_FDCWD, name) == GO ? real(name, mode) : -1;
}
int chmod(const char *name, mode_t mode) {
    REAL(chmod);
    return named("chmod", AT_FDCWD, name) == GO ? real(name, mode) : -1;
}
int fchmodat(int at, const char *name, mode_t mode, int flags) {
    REAL(fchmodat);
    return named("chmod", at, name) == GO ? real(at, name, mode, flags) : -1;
}
