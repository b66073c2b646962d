/* A libnvidia-ml.so.1 that is none: the ABI that nvidia-ml-py calls, and answers that a test writes down.
 *
 * The environment variable NVML_STUB names a file; without it the library answers as if it were not there. The
 * file is looked at in each call and read again when it was replaced. Its lines, in any order of kinds:
 *
 *   system DRIVER NVML CUDA                              the versions; CUDA as a number, 13000
 *   gpu INDEX UUID PCI TOTAL USED NAME...                a GPU; bytes
 *   set INDEX KEY VALUE                                  one of its numbers, see NUMBERS
 *   mig INDEX SLOT UUID GI CI TOTAL USED PROFILE         a MIG instance of it
 *   proc INDEX KIND PID BYTES GI CI                      KIND is compute, graphics or mps
 *   event NUMBER INDEX TYPE DATA COUNT                   is given COUNT times; NUMBERs grow over all files
 *   fail CALL INDEX ERROR                                CALL without its nvml, or *; INDEX -1: any
 *   hang CALL INDEX                                      for as long as the line is there
 *   many CALL INDEX COUNT                                CALL says that there are COUNT
 *
 * Compiled with -DWITH_NVML_H it takes NVIDIA's types from nvml.h, so that the compiler compares all prototypes.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_NVML_H
#include <nvml.h>
#else
typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef int nvmlEnableState_t, nvmlComputeMode_t, nvmlClockType_t, nvmlTemperatureSensors_t;
typedef int nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlPageRetirementCause_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    unsigned sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
#endif
/* The sizes that nvidia-ml-py has for them. */
_Static_assert(sizeof(nvmlProcessInfo_t) == 24 && sizeof(nvmlMemory_v2_t) == 40, "");
_Static_assert(sizeof(nvmlPciInfo_t) == 68 && sizeof(nvmlEventData_t) == 32, "");

enum { OK = 0, UNINIT = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, TIMED_OUT = 10,
       NO_LIBRARY = 12, WRONG_VERSION = 25 };
#define NONE 0xFFFFFFFFu
#define MAX_GPUS 16
#define MAX_MIGS 8
#define MAX_PROCS 512
#define MAX_RULES 64
#define TEXT 128

/* NUMBERS: name, default. NVML's own units: mW, mJ, MHz, percent, degrees Celsius. */
#define NUMBERS(X) \
    X(util_gpu, 0) X(util_memory, 0) X(temperature, 30) X(power, 70000) X(power_limit, 700000) \
    X(energy, 1000) X(clock_graphics, 345) X(clock_sm, 345) X(clock_mem, 2619) X(ecc_mode, 1) \
    X(ecc_vc, 0) X(ecc_vu, 0) X(ecc_ac, 0) X(ecc_au, 0) X(retired_sbe, 0) X(retired_dbe, 0) \
    X(retired_pending, 0) X(remap_corr, 0) X(remap_unc, 0) X(remap_pending, 0) X(remap_failed, 0) \
    X(throttle, 1) X(persistence, 1) X(compute_mode, 0) X(mig, 0) X(mig_pending, 0) X(nvlinks, 18) \
    X(nvlinks_down, 0) X(events, 0xFFFF) X(reserved, 1 << 20)
#define FIELD(name, value) unsigned long long name;
#define SET(name, value) g->name = value;
#define MATCH(n, value) if (strcmp(key, #n) == 0) g->n = number;

struct proc { char kind[16]; unsigned pid, gi, ci; unsigned long long used; };
struct dev {
    int present, is_mig, index, slot;
    char uuid[TEXT], pci[32], name[TEXT];
    unsigned gi, ci;
    unsigned long long total, used;
    NUMBERS(FIELD)
    int procs;
    struct proc proc[MAX_PROCS];
};
struct rule { char call[64]; int index, error, hang; unsigned many; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct dev gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIGS];
static struct rule rules[MAX_RULES];
static int rule_count, gpu_count, inits;
static char driver[TEXT], nvml_version[TEXT];
static int cuda;
static struct { int index; unsigned long long type, data; long long left; } queue[1024];
static int queue_head, queue_tail;
static long long last_event;
static struct stat seen;

static void parse(FILE *file) {
    char line[512], word[64], key[64];
    memset(gpus, 0, sizeof gpus);
    memset(migs, 0, sizeof migs);
    rule_count = gpu_count = 0;
    while (fgets(line, sizeof line, file)) {
        int i = 0, slot = 0, at = 0;
        unsigned long long number = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%63s %n", word, &at) < 1) continue;
        char *rest = line + at;
        if (!strcmp(word, "system")) {
            sscanf(rest, "%127s %127s %d", driver, nvml_version, &cuda);
            continue;
        }
        if (!strcmp(word, "fail") || !strcmp(word, "hang")) {
            struct rule *r = &rules[rule_count++ % MAX_RULES];
            r->hang = !strcmp(word, "hang");
            r->error = 0;
            r->many = 0;
            sscanf(rest, "%63s %d %d", r->call, &r->index, &r->error);
            continue;
        }
        if (!strcmp(word, "many")) {
            struct rule *r = &rules[rule_count++ % MAX_RULES];
            r->hang = r->error = 0;
            sscanf(rest, "%63s %d %u", r->call, &r->index, &r->many);
            continue;
        }
        if (!strcmp(word, "event")) {
            long long event, left;
            unsigned long long type, data;
            sscanf(rest, "%lld %d %llu %llu %lld", &event, &i, &type, &data, &left);
            if (event > last_event && queue_tail < 1024) {
                last_event = event;
                queue[queue_tail].index = i;
                queue[queue_tail].type = type;
                queue[queue_tail].data = data;
                queue[queue_tail++].left = left;
            }
            continue;
        }
        i = atoi(rest);
        if (i < 0 || i >= MAX_GPUS) continue;
        struct dev *g = &gpus[i];
        if (!strcmp(word, "gpu")) {
            NUMBERS(SET)
            g->present = 1;
            g->index = i;
            g->gi = g->ci = NONE;
            sscanf(rest, "%*d %127s %31s %llu %llu %127[^\n]", g->uuid, g->pci, &g->total, &g->used, g->name);
            if (i >= gpu_count) gpu_count = i + 1;
        } else if (!strcmp(word, "set")) {
            sscanf(rest, "%*d %63s %llu", key, &number);
            NUMBERS(MATCH)
        } else if (!strcmp(word, "mig")) {
            sscanf(rest, "%*d %d", &slot);
            struct dev *m = &migs[i][slot % MAX_MIGS];
            m->present = m->is_mig = 1;
            m->index = i;
            m->slot = slot;
            sscanf(rest, "%*d %*d %127s %u %u %llu %llu %127[^\n]", m->uuid, &m->gi, &m->ci, &m->total,
                   &m->used, m->name);
        } else if (!strcmp(word, "proc") && g->procs < MAX_PROCS) {
            struct proc *p = &g->proc[g->procs++];
            sscanf(rest, "%*d %15s %u %llu %u %u", p->kind, &p->pid, &p->used, &p->gi, &p->ci);
        }
    }
}

/* refresh: reads the file again if it is another one; whether there is one. */
static int refresh(void) {
    const char *path = getenv("NVML_STUB");
    struct stat now;
    if (!path || stat(path, &now)) return 0;
    if (now.st_ino != seen.st_ino || now.st_size != seen.st_size ||
        memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim)) {
        FILE *file = fopen(path, "re");
        if (!file) return 0;
        parse(file);
        fclose(file);
        seen = now;
    }
    return 1;
}

static struct rule *rule_for(const char *call, int index) {
    for (int i = 0; i < rule_count; i++)
        if ((rules[i].index == -1 || rules[i].index == index) &&
            (!strcmp(rules[i].call, "*") || !strcmp(rules[i].call, call)))
            return &rules[i];
    return NULL;
}

static int enter(const char *call, int index) {
    for (;;) {
        pthread_mutex_lock(&lock);
        int there = refresh();
        struct rule *rule = rule_for(call, index);
        int hang = there && rule && rule->hang, error = there && rule ? rule->error : OK;
        int up = inits > 0 || !strcmp(call, "InitWithFlags");
        pthread_mutex_unlock(&lock);
        if (!there) return NO_LIBRARY;
        if (!hang) return error ? error : up ? OK : UNINIT;
        usleep(2000);
    }
}

/* many: how many CALL says that there are. */
static unsigned many(const char *call, int index, unsigned there) {
    pthread_mutex_lock(&lock);
    struct rule *rule = rule_for(call, index);
    unsigned said = rule && rule->many ? rule->many : there;
    pthread_mutex_unlock(&lock);
    return said;
}

#define DEV struct dev *g = (struct dev *)device
#define ENTER(call) \
    DEV; \
    if (!g) return INVALID; \
    int code = enter(call, g->index); \
    if (code) return code; \
    if (!g->present) return NOT_FOUND
#define WHOLE(call) ENTER(call); if (g->is_mig) return UNSUPPORTED
#define CALL(call) int code = enter(call, -2); if (code) return code

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    CALL("InitWithFlags");
    (void)flags;
    pthread_mutex_lock(&lock);
    inits++;
    pthread_mutex_unlock(&lock);
    return OK;
}
nvmlReturn_t nvmlShutdown(void) {
    CALL("Shutdown");
    pthread_mutex_lock(&lock);
    if (--inits <= 0) inits = queue_head = queue_tail = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
const char *nvmlErrorString(nvmlReturn_t result) {
    return (int)result == 999 ? "Unknown Error" : "Some Error";
}
static nvmlReturn_t text(char *out, unsigned length, const char *value) {
    if (strlen(value) >= length) return SHORT;
    strcpy(out, value);
    return OK;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    CALL("SystemGetDriverVersion");
    return text(version, length, driver);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    CALL("SystemGetNVMLVersion");
    return text(version, length, nvml_version);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    CALL("SystemGetCudaDriverVersion");
    *version = cuda;
    return OK;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    CALL("DeviceGetCount");
    *count = many("DeviceGetCount", -2, gpu_count);
    return OK;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    int code = enter("DeviceGetHandleByIndex", index);
    if (code) return code;
    if ((int)index >= gpu_count || !gpus[index].present) return INVALID;
    *device = (nvmlDevice_t)&gpus[index];
    return OK;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    ENTER("DeviceGetUUID");
    return text(uuid, length, g->uuid);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    char whole[2 * TEXT + 8];
    ENTER("DeviceGetName");
    if (!g->is_mig) return text(name, length, g->name);
    snprintf(whole, sizeof whole, "%s MIG %s", gpus[g->index].name, g->name);
    return text(name, length, whole);
}
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    WHOLE("DeviceGetMinorNumber");
    *minor = g->index;
    return OK;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER("DeviceGetPciInfo");
    memset(pci, 0, sizeof *pci);
    strcpy(pci->busId, gpus[g->index].pci);
    return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER("DeviceGetMemoryInfo");
    memory->total = g->total;
    memory->used = g->used;
    memory->free = g->total - g->used;
    return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER("DeviceGetMemoryInfo_v2");
    if (memory->version != (sizeof *memory | 2u << 24)) return WRONG_VERSION;
    memory->total = g->total;
    memory->used = g->used;
    memory->reserved = g->reserved;
    memory->free = g->total - g->used;
    return OK;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    WHOLE("DeviceGetUtilizationRates");
    if (g->mig) return UNSUPPORTED; /* as a GPU in MIG mode does */
    rates->gpu = g->util_gpu;
    rates->memory = g->util_memory;
    return OK;
}
#define NUMBER(call, type, field) \
    nvmlReturn_t nvml##call(nvmlDevice_t device, type *value) { \
        WHOLE(#call); \
        *value = (type)g->field; \
        return OK; \
    }
NUMBER(DeviceGetPowerUsage, unsigned int, power)
NUMBER(DeviceGetEnforcedPowerLimit, unsigned int, power_limit)
NUMBER(DeviceGetTotalEnergyConsumption, unsigned long long, energy)
NUMBER(DeviceGetCurrentClocksEventReasons, unsigned long long, throttle)
NUMBER(DeviceGetPersistenceMode, nvmlEnableState_t, persistence)
NUMBER(DeviceGetComputeMode, nvmlComputeMode_t, compute_mode)
NUMBER(DeviceGetRetiredPagesPendingStatus, nvmlEnableState_t, retired_pending)
NUMBER(DeviceGetSupportedEventTypes, unsigned long long, events)

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temp) {
    WHOLE("DeviceGetTemperature");
    if (sensor) return INVALID;
    *temp = g->temperature;
    return OK;
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock) {
    WHOLE("DeviceGetClockInfo");
    *clock = (int)type == 0 ? g->clock_graphics : (int)type == 1 ? g->clock_sm : g->clock_mem;
    return OK;
}
nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
    WHOLE("DeviceGetEccMode");
    *current = *pending = (nvmlEnableState_t)g->ecc_mode;
    return OK;
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *count) {
    WHOLE("DeviceGetTotalEccErrors");
    *count = counter ? (type ? g->ecc_au : g->ecc_ac) : (type ? g->ecc_vu : g->ecc_vc);
    return OK;
}
nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                       unsigned int *count, unsigned long long *pages) {
    WHOLE("DeviceGetRetiredPages");
    unsigned there = cause ? g->retired_dbe : g->retired_sbe, room = *count;
    *count = there;
    if (there > room) return SHORT;
    for (unsigned i = 0; pages && i < there; i++) pages[i] = i << 12;
    return OK;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed) {
    WHOLE("DeviceGetRemappedRows");
    *corrected = g->remap_corr;
    *uncorrected = g->remap_unc;
    *pending = g->remap_pending;
    *failed = g->remap_failed;
    return OK;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
    WHOLE("DeviceGetNvLinkState");
    if (!g->nvlinks) return UNSUPPORTED;
    if (link >= g->nvlinks) return INVALID;
    *active = (nvmlEnableState_t)(link >= g->nvlinks_down);
    return OK;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    WHOLE("DeviceGetMigMode");
    if (g->mig == 2) return UNSUPPORTED; /* a GPU that has no MIG */
    *current = g->mig;
    *pending = g->mig_pending;
    return OK;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    WHOLE("DeviceGetMaxMigDeviceCount");
    *count = many("DeviceGetMaxMigDeviceCount", g->index, 7);
    return OK;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    WHOLE("DeviceGetMigDeviceHandleByIndex");
    if (index >= MAX_MIGS || !migs[g->index][index].present) return NOT_FOUND;
    *mig = (nvmlDevice_t)&migs[g->index][index];
    return OK;
}
#define MIG_ONLY(call, field) \
    nvmlReturn_t nvml##call(nvmlDevice_t device, unsigned int *id) { \
        ENTER(#call); \
        if (!g->is_mig) return INVALID; \
        *id = g->field; \
        return OK; \
    }
MIG_ONLY(DeviceGetGpuInstanceId, gi)
MIG_ONLY(DeviceGetComputeInstanceId, ci)
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    ENTER("DeviceGetAttributes");
    if (!g->is_mig) return INVALID;
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = 16;
    attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount = 1;
    attributes->memorySizeMB = g->total >> 20;
    return OK;
}
static nvmlReturn_t processes(struct dev *g, const char *call, const char *kind, unsigned *count,
                              nvmlProcessInfo_t *infos) {
    unsigned there = 0, room = *count;
    for (int i = 0; i < g->procs; i++) {
        struct proc *p = &g->proc[i];
        if (strcmp(p->kind, kind)) continue;
        if (infos && there < room) {
            infos[there].pid = p->pid;
            infos[there].usedGpuMemory = p->used;
            infos[there].gpuInstanceId = p->gi;
            infos[there].computeInstanceId = p->ci;
        }
        there++;
    }
    *count = many(call, g->index, there);
    return there > room || !infos && *count ? SHORT : OK;
}
#define PROCESSES(call, kind) \
    nvmlReturn_t nvml##call##_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) { \
        WHOLE(#call); \
        return processes(g, #call, kind, count, infos); \
    }
PROCESSES(DeviceGetComputeRunningProcesses, "compute")
PROCESSES(DeviceGetGraphicsRunningProcesses, "graphics")
PROCESSES(DeviceGetMPSComputeRunningProcesses, "mps")

static int watched[MAX_GPUS];
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    CALL("EventSetCreate");
    memset(watched, 0, sizeof watched);
    *set = (nvmlEventSet_t)watched;
    return OK;
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    (void)set;
    CALL("EventSetFree");
    return OK;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    WHOLE("DeviceRegisterEvents");
    (void)set;
    if (types & ~g->events) return UNSUPPORTED;
    watched[g->index] = 1;
    return OK;
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms) {
    (void)set;
    for (unsigned waited = 0;; waited += 2) {
        CALL("EventSetWait");
        pthread_mutex_lock(&lock);
        while (queue_head < queue_tail && (!queue[queue_head].left || !watched[queue[queue_head].index]))
            queue_head++;
        int there = queue_head < queue_tail;
        if (there) {
            queue[queue_head].left--;
            data->device = (nvmlDevice_t)&gpus[queue[queue_head].index];
            data->eventType = queue[queue_head].type;
            data->eventData = queue[queue_head].data;
            data->gpuInstanceId = data->computeInstanceId = NONE;
        } else {
            queue_head = queue_tail = 0;
        }
        pthread_mutex_unlock(&lock);
        if (there) return OK;
        if (waited >= timeoutms) return TIMED_OUT;
        usleep(2000);
    }
}
