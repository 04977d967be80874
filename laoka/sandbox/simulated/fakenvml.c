/* The simulated NVML of laoka's sandbox: answers like libnvidia-ml.so.1 for Tesla V100 cards that are not there.
 *
 * Build:  gcc -O2 -shared -fPIC -DDRIVER_VERSION='"580.173.02"' -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fakenvml.c
 *
 * State: the file named by LAOKA_SANDBOX_GPU_CONF (default /srv/laoka-sandbox/gpu.conf), and faults.conf beside it, whose
 * lines win. Both hold `key=value` lines, the last one for a key counts, and both are read again on every call, so that a
 * change outside shows at once. Host-wide keys: count, driver_loaded, loaded_module, hung. Keys of card N: gpuN.KEY.
 * Link speed and width come from the simulated sysfs beside the state file (sys/bus/pci/devices/BDF), as they have to agree.
 *
 * Numbers of functions, structures and error codes follow NVIDIA's public NVML interface as nvidia-ml-py mirrors it. A key that is
 * missing or "N/A" reads as NVML_ERROR_NOT_SUPPORTED. Nothing here is NVIDIA software and nothing here touches a GPU.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#ifndef DRIVER_VERSION
#define DRIVER_VERSION "580.173.02"
#endif
#define DEFAULT_STATE "/srv/laoka-sandbox/gpu.conf"
#define LAST_VOLTA_BRANCH 580 /* newer branches ignore a V100: they count no card */
#define CUDA_VERSION 13000
#define MAX_GPUS 16
#define VOLTA_ARCHITECTURE 5
#define TESLA_BRAND 2
#define MEMORY_INFO_V2 0x02000028u
#define TEMPERATURE_V1 0x0100000cu
#define HUNG_POLL_NS 50000000L
#define MIB (1024ULL * 1024ULL)

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    OPERATING_SYSTEM = 17,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN_ERROR = 999
} nvml_return;

typedef struct gpu {
    unsigned index;
} *gpu_handle;

/* Both state files, one after the other: faults.conf comes last, so its lines win. */
struct state {
    char text[32768];
};

static struct gpu gpus[MAX_GPUS];
static int init_count;

/* ---- reading the state ------------------------------------------------------------------------------------------- */

static const char *state_path(void) {
    const char *path = getenv("LAOKA_SANDBOX_GPU_CONF");
    return path ? path : DEFAULT_STATE;
}

/* PATH of a file that lies beside the state file. */
static void beside_state(char *out, size_t size, const char *format, ...) {
    const char *path = state_path();
    const char *slash = strrchr(path, '/');
    int used = snprintf(out, size, "%.*s", slash ? (int)(slash - path + 1) : 0, path);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out + used, size - (size_t)used, format, arguments);
    va_end(arguments);
}

/* Append a file to `text`; returns 0 when it could not be read or does not fit. */
static int append_file(const char *path, char *text, size_t size) {
    size_t used = strlen(text);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    used += fread(text + used, 1, size - used - 2, file);
    int complete = fgetc(file) == EOF && !ferror(file);
    fclose(file);
    text[used++] = '\n';
    text[used] = 0;
    return complete;
}

static int read_state(struct state *state) {
    char faults[512];
    state->text[0] = 0;
    if (!append_file(state_path(), state->text, sizeof state->text))
        return 0;
    beside_state(faults, sizeof faults, "faults.conf");
    append_file(faults, state->text, sizeof state->text);
    return 1;
}

/* Copy the value of `key` to `out`; returns 0 when there is none, or it is empty or N/A. */
static int find_value(const struct state *state, const char *key, char *out, size_t size) {
    size_t length = strlen(key);
    const char *found = NULL;
    for (const char *line = state->text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncmp(line, key, length) && line[length] == '=')
            found = line + length + 1;
        if (!*line)
            break;
    }
    if (!found)
        return 0;
    size_t count = strcspn(found, "\n");
    if (count == 0 || count >= size || (count == 3 && !strncmp(found, "N/A", 3)))
        return 0;
    memcpy(out, found, count);
    out[count] = 0;
    return 1;
}

static unsigned long long host_number(const struct state *state, const char *key, unsigned long long fallback) {
    char value[64];
    return find_value(state, key, value, sizeof value) ? strtoull(value, NULL, 0) : fallback;
}

static int gpu_text(const struct state *state, unsigned index, const char *name, char *out, size_t size) {
    char key[96];
    snprintf(key, sizeof key, "gpu%u.%s", index, name);
    return find_value(state, key, out, size);
}

static nvml_return gpu_number(const struct state *state, unsigned index, const char *name, unsigned long long *out) {
    char value[64];
    if (!gpu_text(state, index, name, value, sizeof value))
        return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 0);
    return SUCCESS;
}

static unsigned gpu_count(const struct state *state) {
    if (atoi(DRIVER_VERSION) > LAST_VOLTA_BRANCH)
        return 0;
    unsigned long long count = host_number(state, "count", 0);
    return count > MAX_GPUS ? MAX_GPUS : (unsigned)count;
}

/* Read the state; while it says hung=1, block as a wedged driver blocks its callers. Unlike there, SIGKILL ends the caller. */
static nvml_return load(struct state *state) {
    const struct timespec pause = {0, HUNG_POLL_NS};
    for (;;) {
        if (!read_state(state))
            return DRIVER_NOT_LOADED;
        if (!host_number(state, "hung", 0))
            return SUCCESS;
        nanosleep(&pause, NULL);
    }
}

static nvml_return enter(struct state *state) {
    if (!init_count)
        return UNINITIALIZED;
    return load(state);
}

/* Enter a call about one card. `needs_gpu` is 0 for what the driver answers from its own memory, also when the card is lost. */
static nvml_return enter_gpu(gpu_handle gpu, struct state *state, int needs_gpu) {
    unsigned long long lost = 0;
    nvml_return result = enter(state);
    if (result != SUCCESS)
        return result;
    if (gpu < gpus || gpu >= gpus + MAX_GPUS || gpu->index >= gpu_count(state))
        return INVALID_ARGUMENT;
    if (needs_gpu && gpu_number(state, gpu->index, "lost", &lost) == SUCCESS && lost)
        return GPU_IS_LOST;
    return SUCCESS;
}

static nvml_return copy_text(char *out, unsigned size, const char *text) {
    if (!out)
        return INVALID_ARGUMENT;
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static nvml_return text_value(gpu_handle gpu, const char *name, char *out, unsigned size, int needs_gpu) {
    struct state state;
    char value[128];
    nvml_return result = enter_gpu(gpu, &state, needs_gpu);
    if (result != SUCCESS)
        return result;
    if (!gpu_text(&state, gpu->index, name, value, sizeof value))
        return NOT_SUPPORTED;
    return copy_text(out, size, value);
}

static nvml_return long_value(gpu_handle gpu, const char *name, unsigned long long *out) {
    struct state state;
    if (!out)
        return INVALID_ARGUMENT;
    nvml_return result = enter_gpu(gpu, &state, 1);
    return result != SUCCESS ? result : gpu_number(&state, gpu->index, name, out);
}

static nvml_return unsigned_value(gpu_handle gpu, const char *name, unsigned *out) {
    unsigned long long value;
    if (!out)
        return INVALID_ARGUMENT;
    nvml_return result = long_value(gpu, name, &value);
    if (result == SUCCESS)
        *out = (unsigned)value;
    return result;
}

/* A value that is the same for every card, but needs a card that answers. */
static nvml_return fixed_value(gpu_handle gpu, unsigned value, unsigned *out) {
    struct state state;
    if (!out)
        return INVALID_ARGUMENT;
    nvml_return result = enter_gpu(gpu, &state, 1);
    if (result == SUCCESS)
        *out = value;
    return result;
}

/* ---- writing the state -------------------------------------------------------------------------------------------- */

/* Replace `key` in gpu.conf: temporary file, fsync, rename, under the folder's lock (laoka.sandbox.card takes the same one). */
static nvml_return store(const char *key, unsigned value) {
    struct state state = {{0}};
    char temporary[512], folder[512];
    size_t length = strlen(key);
    beside_state(folder, sizeof folder, ".");
    beside_state(temporary, sizeof temporary, ".gpu.conf.%d", (int)getpid());
    int lock = open(folder, O_RDONLY | O_DIRECTORY);
    if (lock < 0 || flock(lock, LOCK_EX))
        return OPERATING_SYSTEM;
    int done = append_file(state_path(), state.text, sizeof state.text);
    FILE *file = done ? fopen(temporary, "w") : NULL;
    done = file != NULL;
    if (file) {
        for (char *line = strtok(state.text, "\n"); line; line = strtok(NULL, "\n"))
            if (strncmp(line, key, length) || line[length] != '=')
                fprintf(file, "%s\n", line);
        fprintf(file, "%s=%u\n", key, value);
        done = !fflush(file) && !fsync(fileno(file));
        done = !fclose(file) && done && !rename(temporary, state_path());
        if (!done)
            unlink(temporary);
    }
    close(lock);
    return done ? SUCCESS : OPERATING_SYSTEM;
}

static nvml_return store_gpu(gpu_handle gpu, const char *name, unsigned value) {
    char key[96];
    snprintf(key, sizeof key, "gpu%u.%s", gpu->index, name);
    return geteuid() ? NO_PERMISSION : store(key, value);
}

/* ---- library ------------------------------------------------------------------------------------------------------ */

/* Whether /proc/driver/nvidia/version of the simulated host is there and names another version than this library's. */
static int other_module_is_loaded(void) {
    char path[512], text[512] = "";
    beside_state(path, sizeof path, "proc/driver/nvidia/version");
    append_file(path, text, sizeof text);
    return *text && !strstr(text, "  " DRIVER_VERSION "  ");
}

EXPORT nvml_return nvmlInitWithFlags(unsigned flags) {
    struct state state;
    char loaded[64];
    (void)flags;
    nvml_return result = load(&state);
    if (result != SUCCESS)
        return result;
    if (!host_number(&state, "driver_loaded", 1))
        return DRIVER_NOT_LOADED;
    if (find_value(&state, "loaded_module", loaded, sizeof loaded) && strcmp(loaded, DRIVER_VERSION))
        return LIB_RM_VERSION_MISMATCH;
    if (other_module_is_loaded())
        return LIB_RM_VERSION_MISMATCH;
    for (unsigned i = 0; i < MAX_GPUS; i++)
        gpus[i].index = i;
    __atomic_add_fetch(&init_count, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

EXPORT nvml_return nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT nvml_return nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT nvml_return nvmlShutdown(void) {
    struct state state;
    nvml_return result = enter(&state);
    if (result == SUCCESS)
        __atomic_sub_fetch(&init_count, 1, __ATOMIC_SEQ_CST);
    return result;
}

EXPORT const char *nvmlErrorString(nvml_return result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case OPERATING_SYSTEM: return "Operating System Call Failed";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT nvml_return nvmlSystemGetDriverVersion(char *version, unsigned length) {
    struct state state;
    nvml_return result = enter(&state);
    return result != SUCCESS ? result : copy_text(version, length, DRIVER_VERSION);
}

/* Answered without nvmlInit, as nvidia-smi prints it when the versions of driver and library differ. */
EXPORT nvml_return nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    return copy_text(version, length, "13." DRIVER_VERSION);
}

EXPORT nvml_return nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (!version)
        return INVALID_ARGUMENT;
    *version = CUDA_VERSION;
    return SUCCESS;
}

EXPORT nvml_return nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT nvml_return nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    (void)pid, (void)name, (void)length;
    return NOT_FOUND; /* no process ever runs on a simulated card */
}

/* ---- finding cards ------------------------------------------------------------------------------------------------ */

EXPORT nvml_return nvmlDeviceGetCount_v2(unsigned *count) {
    struct state state;
    nvml_return result = enter(&state);
    if (result == SUCCESS)
        *count = gpu_count(&state);
    return result;
}

EXPORT nvml_return nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

/* The handle is set for a lost card too: the simulated nvidia-smi needs its bus id for the message. */
static nvml_return open_gpu(const struct state *state, unsigned index, gpu_handle *gpu) {
    unsigned long long lost = 0;
    gpu_number(state, index, "lost_at_open", &lost);
    *gpu = &gpus[index];
    return lost ? GPU_IS_LOST : SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_handle *gpu) {
    struct state state;
    nvml_return result = enter(&state);
    if (result != SUCCESS)
        return result;
    return index < gpu_count(&state) ? open_gpu(&state, index, gpu) : INVALID_ARGUMENT;
}

EXPORT nvml_return nvmlDeviceGetHandleByIndex(unsigned index, gpu_handle *gpu) {
    return nvmlDeviceGetHandleByIndex_v2(index, gpu);
}

/* The card whose state has `wanted` under `name`. */
static nvml_return open_by_text(const char *name, const char *wanted, gpu_handle *gpu) {
    struct state state;
    char value[128];
    nvml_return result = enter(&state);
    if (result != SUCCESS)
        return result;
    for (unsigned index = 0; index < gpu_count(&state); index++)
        if (gpu_text(&state, index, name, value, sizeof value) && !strcasecmp(value, wanted))
            return open_gpu(&state, index, gpu);
    return NOT_FOUND;
}

EXPORT nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, gpu_handle *gpu) {
    return open_by_text("uuid", uuid, gpu);
}

EXPORT nvml_return nvmlDeviceGetHandleBySerial(const char *serial, gpu_handle *gpu) {
    return open_by_text("serial", serial, gpu);
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, gpu_handle *gpu) {
    unsigned domain = 0, bus, device, function = 0;
    char normal[32];
    if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
        domain = 0;
        if (sscanf(bus_id, "%x:%x.%x", &bus, &device, &function) < 2)
            return INVALID_ARGUMENT;
    }
    snprintf(normal, sizeof normal, "%04x:%02x:%02x.%x", domain, bus, device, function);
    return open_by_text("bdf", normal, gpu);
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId(const char *bus_id, gpu_handle *gpu) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, gpu);
}

/* ---- identity ----------------------------------------------------------------------------------------------------- */

EXPORT nvml_return nvmlDeviceGetIndex(gpu_handle gpu, unsigned *index) {
    struct state state;
    nvml_return result = enter_gpu(gpu, &state, 0);
    if (result == SUCCESS)
        *index = gpu->index;
    return result;
}

EXPORT nvml_return nvmlDeviceGetMinorNumber(gpu_handle gpu, unsigned *minor) { return nvmlDeviceGetIndex(gpu, minor); }

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_info;

EXPORT nvml_return nvmlDeviceGetPciInfo_v3(gpu_handle gpu, pci_info *pci) {
    struct state state;
    char bdf[32];
    unsigned function = 0;
    unsigned long long value;
    nvml_return result = enter_gpu(gpu, &state, 0);
    if (result != SUCCESS)
        return result;
    memset(pci, 0, sizeof *pci);
    if (!gpu_text(&state, gpu->index, "bdf", bdf, sizeof bdf) ||
        sscanf(bdf, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function) != 4)
        return UNKNOWN_ERROR;
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.%X", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0x1f, function & 7);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.%X", pci->domain, pci->bus, pci->device, function);
    if (gpu_number(&state, gpu->index, "pci_device_id", &value) == SUCCESS)
        pci->pci_device_id = (unsigned)value;
    if (gpu_number(&state, gpu->index, "pci_subsystem_id", &value) == SUCCESS)
        pci->pci_subsystem_id = (unsigned)value;
    return SUCCESS;
}

#define TEXT_OF_GPU(function, name, needs_gpu)                                                                         \
    EXPORT nvml_return function(gpu_handle gpu, char *out, unsigned size) {                                            \
        return text_value(gpu, name, out, size, needs_gpu);                                                            \
    }
TEXT_OF_GPU(nvmlDeviceGetName, "name", 1)
TEXT_OF_GPU(nvmlDeviceGetUUID, "uuid", 1)
TEXT_OF_GPU(nvmlDeviceGetSerial, "serial", 1)
TEXT_OF_GPU(nvmlDeviceGetVbiosVersion, "vbios", 1)
TEXT_OF_GPU(nvmlDeviceGetBoardPartNumber, "board_part_number", 1)
TEXT_OF_GPU(nvmlDeviceGetInforomImageVersion, "inforom_image", 1)

EXPORT nvml_return nvmlDeviceGetInforomVersion(gpu_handle gpu, int object, char *out, unsigned size) {
    static const char *const names[] = {"inforom_oem", "inforom_ecc", "inforom_power"};
    return object < 0 || object > 2 ? INVALID_ARGUMENT : text_value(gpu, names[object], out, size, 1);
}

EXPORT nvml_return nvmlDeviceGetBoardId(gpu_handle gpu, unsigned *board) {
    pci_info pci;
    nvml_return result = nvmlDeviceGetPciInfo_v3(gpu, &pci);
    if (result == SUCCESS)
        *board = pci.bus << 8 | pci.device;
    return result;
}

EXPORT nvml_return nvmlDeviceGetArchitecture(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, VOLTA_ARCHITECTURE, out); }
EXPORT nvml_return nvmlDeviceGetBrand(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, TESLA_BRAND, out); }
EXPORT nvml_return nvmlDeviceGetMultiGpuBoard(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 0, out); }

EXPORT nvml_return nvmlDeviceGetCudaComputeCapability(gpu_handle gpu, int *major, int *minor) {
    unsigned seven;
    nvml_return result = fixed_value(gpu, 7, &seven);
    if (result == SUCCESS) {
        *major = (int)seven;
        *minor = 0;
    }
    return result;
}

/* ---- memory, ECC and retired pages ---------------------------------------------------------------------------------- */

static nvml_return memory(gpu_handle gpu, const char *total_key, const char *used_key, unsigned long long *total,
                          unsigned long long *used) {
    *total = *used = 0;
    nvml_return result = long_value(gpu, total_key, total);
    if (result == SUCCESS)
        result = long_value(gpu, used_key, used);
    *total *= MIB;
    *used *= MIB;
    return result;
}

typedef struct {
    unsigned long long total, free, used;
} memory_info;

EXPORT nvml_return nvmlDeviceGetMemoryInfo(gpu_handle gpu, memory_info *info) {
    nvml_return result = memory(gpu, "memory_mib", "memory_used_mib", &info->total, &info->used);
    info->free = info->total - info->used;
    return result;
}

EXPORT nvml_return nvmlDeviceGetBAR1MemoryInfo(gpu_handle gpu, memory_info *info) {
    nvml_return result = memory(gpu, "bar1_mib", "bar1_used_mib", &info->total, &info->used);
    info->free = info->total - info->used;
    return result;
}

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_info_v2;

EXPORT nvml_return nvmlDeviceGetMemoryInfo_v2(gpu_handle gpu, memory_info_v2 *info) {
    if (info->version != MEMORY_INFO_V2)
        return ARGUMENT_VERSION_MISMATCH;
    nvml_return result = memory(gpu, "memory_mib", "memory_used_mib", &info->total, &info->used);
    info->reserved = 0; /* what R580 reserves on a V100 is not known */
    info->free = info->total - info->used;
    return result;
}

EXPORT nvml_return nvmlDeviceGetEccMode(gpu_handle gpu, unsigned *current, unsigned *pending) {
    nvml_return result = unsigned_value(gpu, "ecc_mode", current);
    return result != SUCCESS ? result : unsigned_value(gpu, "ecc_mode_pending", pending);
}

EXPORT nvml_return nvmlDeviceGetDefaultEccMode(gpu_handle gpu, unsigned *mode) { return fixed_value(gpu, 1, mode); }

/* error_type: 0 corrected, 1 uncorrected; counter: 0 volatile, 1 aggregate. */
EXPORT nvml_return nvmlDeviceGetTotalEccErrors(gpu_handle gpu, unsigned error_type, unsigned counter, unsigned long long *out) {
    static const char *const names[2][2] = {{"ecc_corrected_volatile", "ecc_corrected_aggregate"},
                                            {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"}};
    return error_type > 1 || counter > 1 ? INVALID_ARGUMENT : long_value(gpu, names[error_type][counter], out);
}

/* All simulated errors are in device memory (location 2); the caches and the register file (0, 1, 3) have none. */
EXPORT nvml_return nvmlDeviceGetMemoryErrorCounter(gpu_handle gpu, unsigned error_type, unsigned counter, unsigned location,
                                                   unsigned long long *out) {
    nvml_return result = nvmlDeviceGetTotalEccErrors(gpu, error_type, counter, out);
    if (result != SUCCESS || location == 2)
        return result;
    *out = 0;
    if (location == 6) /* the convergence barrier unit only has uncorrected errors */
        return error_type == 1 ? SUCCESS : NOT_SUPPORTED;
    return location <= 3 ? SUCCESS : NOT_SUPPORTED;
}

/* cause: 0 several single-bit errors, 1 a double-bit error. */
EXPORT nvml_return nvmlDeviceGetRetiredPages(gpu_handle gpu, unsigned cause, unsigned *count, unsigned long long *addresses) {
    unsigned pages;
    unsigned long long first;
    if (cause > 1 || !count)
        return INVALID_ARGUMENT;
    nvml_return result = unsigned_value(gpu, cause ? "retired_dbe" : "retired_sbe", &pages);
    if (result == SUCCESS)
        result = long_value(gpu, "retired_first_page", &first);
    if (result != SUCCESS)
        return result;
    int fits = *count >= pages && (addresses || !pages);
    *count = pages;
    for (unsigned i = 0; fits && i < pages; i++)
        addresses[i] = first + i + (cause ? 0x100 : 0);
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

EXPORT nvml_return nvmlDeviceGetRetiredPagesPendingStatus(gpu_handle gpu, unsigned *pending) {
    return unsigned_value(gpu, "retired_pending", pending);
}

/* ---- temperature, power and clocks ---------------------------------------------------------------------------------- */

EXPORT nvml_return nvmlDeviceGetTemperature(gpu_handle gpu, unsigned sensor, unsigned *celsius) {
    return sensor ? INVALID_ARGUMENT : unsigned_value(gpu, "temperature_c", celsius);
}

typedef struct {
    unsigned version, sensor;
    int celsius;
} temperature;

EXPORT nvml_return nvmlDeviceGetTemperatureV(gpu_handle gpu, temperature *out) {
    unsigned celsius = 0;
    if (out->version != TEMPERATURE_V1)
        return ARGUMENT_VERSION_MISMATCH;
    nvml_return result = nvmlDeviceGetTemperature(gpu, out->sensor, &celsius);
    out->celsius = (int)celsius;
    return result;
}

EXPORT nvml_return nvmlDeviceGetTemperatureThreshold(gpu_handle gpu, unsigned kind, unsigned *celsius) {
    static const char *const names[] = {"shutdown_c", "slowdown_c", "memory_max_c", "gpu_max_c"};
    return kind > 3 ? NOT_SUPPORTED : unsigned_value(gpu, names[kind], celsius);
}

#define NUMBER_OF_GPU(function, name)                                                                                  \
    EXPORT nvml_return function(gpu_handle gpu, unsigned *out) { return unsigned_value(gpu, name, out); }
NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, "power_mw")
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
NUMBER_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementDefaultLimit, "power_default_mw")
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER_OF_GPU(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER_OF_GPU(nvmlDeviceGetPerformanceState, "pstate")
NUMBER_OF_GPU(nvmlDeviceGetPowerState, "pstate")
NUMBER_OF_GPU(nvmlDeviceGetPcieReplayCounter, "replays")

EXPORT nvml_return nvmlDeviceGetPowerManagementMode(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 1, out); }
EXPORT nvml_return nvmlDeviceGetDisplayMode(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 0, out); }
EXPORT nvml_return nvmlDeviceGetDisplayActive(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 0, out); }
EXPORT nvml_return nvmlDeviceGetNumFans(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 0, out); }
EXPORT nvml_return nvmlDeviceGetMaxMigDeviceCount(gpu_handle gpu, unsigned *out) { return fixed_value(gpu, 0, out); }

EXPORT nvml_return nvmlDeviceGetPowerManagementLimitConstraints(gpu_handle gpu, unsigned *minimum, unsigned *maximum) {
    nvml_return result = unsigned_value(gpu, "power_min_mw", minimum);
    return result != SUCCESS ? result : unsigned_value(gpu, "power_max_mw", maximum);
}

EXPORT nvml_return nvmlDeviceSetPowerManagementLimit(gpu_handle gpu, unsigned milliwatts) {
    unsigned minimum, maximum;
    nvml_return result = nvmlDeviceGetPowerManagementLimitConstraints(gpu, &minimum, &maximum);
    if (result != SUCCESS)
        return result;
    if (milliwatts < minimum || milliwatts > maximum)
        return INVALID_ARGUMENT;
    return store_gpu(gpu, "power_limit_mw", milliwatts);
}

EXPORT nvml_return nvmlDeviceSetPersistenceMode(gpu_handle gpu, unsigned mode) {
    unsigned now;
    nvml_return result = unsigned_value(gpu, "persistence", &now);
    if (result != SUCCESS)
        return result;
    return mode > 1 ? INVALID_ARGUMENT : store_gpu(gpu, "persistence", mode);
}

/* As on a real card, the mode is pending until the next boot. */
EXPORT nvml_return nvmlDeviceSetEccMode(gpu_handle gpu, unsigned mode) {
    unsigned now;
    nvml_return result = unsigned_value(gpu, "ecc_mode", &now);
    if (result != SUCCESS)
        return result;
    return mode > 1 ? INVALID_ARGUMENT : store_gpu(gpu, "ecc_mode_pending", mode);
}

EXPORT nvml_return nvmlDeviceSetComputeMode(gpu_handle gpu, unsigned mode) {
    unsigned now;
    nvml_return result = unsigned_value(gpu, "compute_mode", &now);
    if (result != SUCCESS)
        return result;
    return mode > 3 || mode == 1 ? INVALID_ARGUMENT : store_gpu(gpu, "compute_mode", mode);
}

static nvml_return clock_value(gpu_handle gpu, const char *prefix, unsigned kind, unsigned *mhz) {
    static const char *const names[] = {"graphics", "sm", "memory", "video"};
    char name[64];
    if (kind > 3)
        return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%s_%s_mhz", prefix, names[kind]);
    return unsigned_value(gpu, name, mhz);
}

EXPORT nvml_return nvmlDeviceGetClockInfo(gpu_handle gpu, unsigned kind, unsigned *mhz) {
    return clock_value(gpu, "clock", kind, mhz);
}

EXPORT nvml_return nvmlDeviceGetMaxClockInfo(gpu_handle gpu, unsigned kind, unsigned *mhz) {
    return clock_value(gpu, "max_clock", kind, mhz);
}

/* Application clocks: what was set, else not supported (the defaults of a card are not known here). */
EXPORT nvml_return nvmlDeviceGetApplicationsClock(gpu_handle gpu, unsigned kind, unsigned *mhz) {
    return kind == 0 || kind == 2 ? clock_value(gpu, "application_clock", kind, mhz) : NOT_SUPPORTED;
}

EXPORT nvml_return nvmlDeviceSetApplicationsClocks(gpu_handle gpu, unsigned memory_mhz, unsigned graphics_mhz) {
    unsigned memory_max, graphics_max;
    nvml_return result = nvmlDeviceGetMaxClockInfo(gpu, 2, &memory_max);
    if (result == SUCCESS)
        result = nvmlDeviceGetMaxClockInfo(gpu, 0, &graphics_max);
    if (result != SUCCESS)
        return result;
    if (memory_mhz != memory_max || graphics_mhz > graphics_max || graphics_mhz < 135)
        return INVALID_ARGUMENT; /* HBM2 has one clock */
    result = store_gpu(gpu, "application_clock_memory_mhz", memory_mhz);
    return result != SUCCESS ? result : store_gpu(gpu, "application_clock_graphics_mhz", graphics_mhz);
}

EXPORT nvml_return nvmlDeviceGetCurrentClocksEventReasons(gpu_handle gpu, unsigned long long *reasons) {
    return long_value(gpu, "clocks_event_reasons", reasons);
}

EXPORT nvml_return nvmlDeviceGetCurrentClocksThrottleReasons(gpu_handle gpu, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(gpu, reasons);
}

EXPORT nvml_return nvmlDeviceGetSupportedClocksEventReasons(gpu_handle gpu, unsigned long long *reasons) {
    unsigned mask;
    nvml_return result = fixed_value(gpu, 0x1ff, &mask);
    if (result == SUCCESS)
        *reasons = mask;
    return result;
}

EXPORT nvml_return nvmlDeviceGetSupportedClocksThrottleReasons(gpu_handle gpu, unsigned long long *reasons) {
    return nvmlDeviceGetSupportedClocksEventReasons(gpu, reasons);
}

/* ---- link ----------------------------------------------------------------------------------------------------------- */

/* Read one file of the card's simulated sysfs entry. */
static nvml_return link_file(gpu_handle gpu, const char *name, char *out, size_t size) {
    struct state state;
    char bdf[32], path[512];
    nvml_return result = enter_gpu(gpu, &state, 1);
    if (result != SUCCESS)
        return result;
    if (!gpu_text(&state, gpu->index, "bdf", bdf, sizeof bdf))
        return UNKNOWN_ERROR;
    beside_state(path, sizeof path, "sys/bus/pci/devices/%s/%s", bdf, name);
    out[0] = 0;
    return append_file(path, out, size) ? SUCCESS : GPU_IS_LOST;
}

static nvml_return link_generation(gpu_handle gpu, const char *name, unsigned *out) {
    static const double gigatransfers[] = {2.5, 5.0, 8.0, 16.0};
    char text[64];
    nvml_return result = link_file(gpu, name, text, sizeof text);
    if (result != SUCCESS)
        return result;
    for (unsigned i = 0; i < 4; i++)
        if (strtod(text, NULL) == gigatransfers[i]) {
            *out = i + 1;
            return SUCCESS;
        }
    return UNKNOWN_ERROR;
}

static nvml_return link_width(gpu_handle gpu, const char *name, unsigned *out) {
    char text[64];
    nvml_return result = link_file(gpu, name, text, sizeof text);
    if (result == SUCCESS)
        *out = (unsigned)strtoul(text, NULL, 10);
    return result;
}

EXPORT nvml_return nvmlDeviceGetCurrPcieLinkGeneration(gpu_handle gpu, unsigned *out) {
    return link_generation(gpu, "current_link_speed", out);
}
EXPORT nvml_return nvmlDeviceGetMaxPcieLinkGeneration(gpu_handle gpu, unsigned *out) {
    return link_generation(gpu, "max_link_speed", out);
}
EXPORT nvml_return nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu_handle gpu, unsigned *out) {
    return link_generation(gpu, "max_link_speed", out);
}
EXPORT nvml_return nvmlDeviceGetCurrPcieLinkWidth(gpu_handle gpu, unsigned *out) { return link_width(gpu, "current_link_width", out); }
EXPORT nvml_return nvmlDeviceGetMaxPcieLinkWidth(gpu_handle gpu, unsigned *out) { return link_width(gpu, "max_link_width", out); }

EXPORT nvml_return nvmlDeviceGetPcieThroughput(gpu_handle gpu, unsigned counter, unsigned *kb_per_s) {
    return counter > 1 ? INVALID_ARGUMENT : fixed_value(gpu, 0, kb_per_s);
}

/* On a single SXM2-to-PCIe adapter every NVLink is inactive; a PCIe card has none. */
EXPORT nvml_return nvmlDeviceGetNvLinkState(gpu_handle gpu, unsigned link, unsigned *active) {
    unsigned links;
    nvml_return result = unsigned_value(gpu, "nvlinks", &links);
    if (result != SUCCESS)
        return result;
    *active = 0;
    return link < links ? SUCCESS : INVALID_ARGUMENT;
}

/* ---- use -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned gpu, memory;
} utilization;

EXPORT nvml_return nvmlDeviceGetUtilizationRates(gpu_handle gpu, utilization *out) {
    nvml_return result = unsigned_value(gpu, "utilization_gpu", &out->gpu);
    return result != SUCCESS ? result : unsigned_value(gpu, "utilization_memory", &out->memory);
}

static nvml_return no_codec(gpu_handle gpu, unsigned *percent, unsigned *period_us) {
    *period_us = 0;
    return fixed_value(gpu, 0, percent);
}

EXPORT nvml_return nvmlDeviceGetEncoderUtilization(gpu_handle gpu, unsigned *percent, unsigned *period_us) {
    return no_codec(gpu, percent, period_us);
}

EXPORT nvml_return nvmlDeviceGetDecoderUtilization(gpu_handle gpu, unsigned *percent, unsigned *period_us) {
    return no_codec(gpu, percent, period_us);
}

/* No process ever runs on a simulated card. */
#define NO_PROCESSES(function)                                                                                         \
    EXPORT nvml_return function(gpu_handle gpu, unsigned *count, void *processes) {                                    \
        (void)processes;                                                                                               \
        return fixed_value(gpu, 0, count);                                                                             \
    }
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* ---- field values --------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned field, scope;
    long long timestamp_us, latency_us;
    unsigned value_type; /* 1: unsigned int, 3: unsigned long long */
    nvml_return result;
    union {
        unsigned as_unsigned;
        unsigned long long as_long;
    } value;
} field_value;

static const struct {
    unsigned field, value_type;
    const char *name;
} fields[] = {
    {1, 1, "ecc_mode"},
    {2, 1, "ecc_mode_pending"},
    {3, 3, "ecc_corrected_volatile"},
    {4, 3, "ecc_uncorrected_volatile"},
    {5, 3, "ecc_corrected_aggregate"},
    {6, 3, "ecc_uncorrected_aggregate"},
    {29, 1, "retired_sbe"},
    {30, 1, "retired_dbe"},
    {31, 1, "retired_pending"},
    {82, 1, "memory_temperature_c"},
    {185, 1, "power_mw"},
    {186, 1, "power_mw"},
    {187, 1, "power_min_mw"},
    {188, 1, "power_max_mw"},
    {189, 1, "power_default_mw"},
    {190, 1, "power_limit_mw"},
    {192, 1, "power_limit_mw"},
    {230, 1, "recovery_action"},
};

static void fill_field(gpu_handle gpu, field_value *value) {
    struct timespec now;
    unsigned long long number = 0;
    clock_gettime(CLOCK_REALTIME, &now);
    value->timestamp_us = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
    value->latency_us = 0;
    value->result = NOT_SUPPORTED;
    value->value.as_long = 0;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].field != value->field)
            continue;
        value->value_type = fields[i].value_type;
        value->result = long_value(gpu, fields[i].name, &number);
        if (value->value_type == 1)
            value->value.as_unsigned = (unsigned)number;
        else
            value->value.as_long = number;
    }
}

EXPORT nvml_return nvmlDeviceGetFieldValues(gpu_handle gpu, int count, field_value *values) {
    struct state state;
    nvml_return result = enter_gpu(gpu, &state, 1);
    for (int i = 0; result == SUCCESS && i < count; i++)
        fill_field(gpu, &values[i]);
    return result;
}

/* ---- what a V100 does not have, or the sandbox does not simulate ------------------------------------------------------ */

/* The arguments are never read, so one shape serves every function. */
#define UNSUPPORTED(function)                                                                                          \
    EXPORT nvml_return function(void) { return NOT_SUPPORTED; }
UNSUPPORTED(nvmlDeviceClearEccErrorCounts)
UNSUPPORTED(nvmlDeviceGetAccountingMode)
UNSUPPORTED(nvmlDeviceGetAutoBoostedClocksEnabled)
UNSUPPORTED(nvmlDeviceGetBridgeChipInfo)
UNSUPPORTED(nvmlDeviceGetClock)
UNSUPPORTED(nvmlDeviceGetCpuAffinity)
UNSUPPORTED(nvmlDeviceGetDefaultApplicationsClock)
UNSUPPORTED(nvmlDeviceGetDriverModel)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetFanSpeed_v2)
UNSUPPORTED(nvmlDeviceGetGpuOperationMode)
UNSUPPORTED(nvmlDeviceGetGspFirmwareMode)
UNSUPPORTED(nvmlDeviceGetGspFirmwareVersion)
UNSUPPORTED(nvmlDeviceGetMemoryBusWidth)
UNSUPPORTED(nvmlDeviceGetMigMode)
UNSUPPORTED(nvmlDeviceGetNumGpuCores)
UNSUPPORTED(nvmlDeviceGetNvLinkErrorCounter)
UNSUPPORTED(nvmlDeviceGetNvLinkVersion)
UNSUPPORTED(nvmlDeviceGetPcieSpeed)
UNSUPPORTED(nvmlDeviceGetProcessUtilization)
UNSUPPORTED(nvmlDeviceGetRemappedRows)
UNSUPPORTED(nvmlDeviceGetRowRemapperHistogram)
UNSUPPORTED(nvmlDeviceGetSupportedGraphicsClocks)
UNSUPPORTED(nvmlDeviceGetSupportedMemoryClocks)
UNSUPPORTED(nvmlDeviceGetThermalSettings)
UNSUPPORTED(nvmlDeviceGetTotalEnergyConsumption)
UNSUPPORTED(nvmlDeviceGetViolationStatus)
UNSUPPORTED(nvmlDeviceGetVirtualizationMode)
UNSUPPORTED(nvmlDeviceIsMigDeviceHandle)
UNSUPPORTED(nvmlDeviceRegisterEvents)
UNSUPPORTED(nvmlDeviceResetApplicationsClocks)
UNSUPPORTED(nvmlDeviceResetGpuLockedClocks)
UNSUPPORTED(nvmlDeviceSetGpuLockedClocks)
UNSUPPORTED(nvmlEventSetCreate)
UNSUPPORTED(nvmlEventSetFree)
UNSUPPORTED(nvmlEventSetWait_v2)
