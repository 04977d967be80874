/* nvidia-persistenced, simulated by laoka's sandbox: turns persistence mode on for every simulated card, then waits for SIGTERM.
 *
 * Build:  gcc -O2 -o nvidia-persistenced persistenced.c /path/to/the/simulated/libnvidia-ml.so.1
 *
 * As with the real daemon, --no-persistence-mode leaves the mode alone; other options are accepted and do nothing. It stays in the
 * foreground (its unit is Type=simple).
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int nvmlInitWithFlags(unsigned flags);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu);
int nvmlDeviceSetPersistenceMode(void *gpu, unsigned mode);
const char *nvmlErrorString(int result);

static void stop(int signal) {
    (void)signal;
    _exit(0);
}

static int fail(const char *what, int result) {
    fprintf(stderr, "nvidia-persistenced (simulated by laoka's sandbox): %s: %s\n", what, nvmlErrorString(result));
    return 1;
}

int main(int argc, char **argv) {
    unsigned mode = 1, count = 0, changed = 0;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--no-persistence-mode"))
            mode = 0;
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    int result = nvmlInitWithFlags(0);
    if (result == 0)
        result = nvmlDeviceGetCount_v2(&count);
    if (result)
        return fail("cannot reach the simulated driver", result);
    for (unsigned i = 0; mode && i < count; i++) {
        void *gpu;
        result = nvmlDeviceGetHandleByIndex_v2(i, &gpu);
        if (result == 0)
            result = nvmlDeviceSetPersistenceMode(gpu, 1);
        if (result)
            fail("persistence mode", result);
        else
            changed++;
    }
    printf("nvidia-persistenced (simulated by laoka's sandbox): persistence mode %s for %u of %u GPU(s)\n",
           mode ? "on" : "left alone", mode ? changed : count, count);
    fflush(stdout);
    for (;;)
        pause();
}
