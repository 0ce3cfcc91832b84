/* Preloaded: every fsync and fdatasync takes $SLOW_DISK_S seconds, while the file $SLOW_DISK exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int slowly(const char *name, int fd) {
    const char *flag = getenv("SLOW_DISK");
    if (flag && access(flag, F_OK) == 0) {
        struct timespec pause = {atoi(getenv("SLOW_DISK_S")), 0};
        nanosleep(&pause, 0);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return slowly("fsync", fd); }
int fdatasync(int fd) { return slowly("fdatasync", fd); }
