/* A libnvidia-ml.so.1 whose GPUs are the lines of the file in MIZZEN_FAKE_NVML, which is read at every call:
 *
 *     gpu MINOR BUS UUID NAME TOTAL_MIB USED_MIB PERCENT ECC [PID:MIB ...]
 *     xid INDEX NUMBER
 *
 * BUS is the number of the PCI bus in hexadecimal; `_` in NAME is a space; ECC is the number of uncorrectable errors. A line
 * `xid` is an event, for those who waited for events before it was there. Without the file, the driver is not loaded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NO_SUPPORT = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10 };
typedef unsigned long long u64;
typedef struct { unsigned minor, bus, total, used, percent, ecc, processes; char uuid[96], name[96];
                 struct { unsigned pid, mib; } process[16]; } Gpu;
typedef struct { unsigned pid; u64 bytes; unsigned gi, ci; } Process;

typedef struct { char old[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } Pci;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { void *device; u64 type, data; unsigned gi, ci; } Event;

static FILE *state(void) { char *path = getenv("MIZZEN_FAKE_NVML"); return path ? fopen(path, "r") : NULL; }

/* Sets `event` and `xid` to the event after the first `*seen`, if there is one, and `seen` to the number of events. */
static int read_gpus(Gpu *gpus, unsigned *seen, unsigned *event, unsigned *xid) {
    char line[1024]; int count = 0; unsigned events = 0; FILE *file = state();
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) {
        Gpu g = {0}; unsigned index, number; int at = 0;
        if (sscanf(line, "gpu %u %x %95s %95s %u %u %u %u%n", &g.minor, &g.bus, g.uuid, g.name, &g.total, &g.used,
                   &g.percent, &g.ecc, &at) == 8) {
            for (int step; sscanf(line + at, " %u:%u%n", &g.process[g.processes].pid, &g.process[g.processes].mib,
                                  &step) == 2; at += step) g.processes++;
            for (char *c = g.name; *c; c++) if (*c == '_') *c = ' ';
            if (gpus) gpus[count] = g;
            count++;
        } else if (sscanf(line, "xid %u %u", &index, &number) == 2 && ++events && event && events == *seen + 1) {
            *event = index + 1; *xid = number;
        }
    }
    if (!event) *seen = events;
    fclose(file);
    return count;
}

static int get(void *handle, Gpu *gpu) {
    Gpu gpus[16]; unsigned seen; int count = read_gpus(gpus, &seen, NULL, NULL), index = (int)(long)handle - 1;
    if (index < 0 || index >= count) return NOT_FOUND;
    *gpu = gpus[index];
    return OK;
}
#define GPU Gpu g; int bad = get(handle, &g); if (bad) return bad

int nvmlInitWithFlags(unsigned flags) { unsigned seen; return read_gpus(NULL, &seen, NULL, NULL) < 0 ? NO_DRIVER : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "an error of the fake"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    unsigned seen; int found = read_gpus(NULL, &seen, NULL, NULL); *count = found < 0 ? 0 : found; return found < 0 ? NO_DRIVER : OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    Gpu g; *handle = (void *)(long)(index + 1); return get(*handle, &g);
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { GPU; snprintf(name, size, "%s", g.name); return OK; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) { GPU; snprintf(uuid, size, "%s", g.uuid); return OK; }
int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) { GPU; *minor = g.minor; return OK; }
int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    GPU; memset(pci, 0, sizeof *pci); pci->bus = g.bus;
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", g.bus);
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory *memory) {
    GPU; memory->total = (u64)g.total << 20; memory->used = (u64)g.used << 20;
    memory->reserved = 0; memory->free = memory->total - memory->used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates) {
    GPU; rates->gpu = g.percent; rates->memory = 0; return OK;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count) {
    GPU; *count = type == 1 ? g.ecc : 0; return OK;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *a, unsigned *b, unsigned *c, unsigned *d) { return NO_SUPPORT; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *out) {
    GPU; unsigned room = *count; *count = g.processes;
    if (!out || room < g.processes) return g.processes ? TOO_SMALL : OK;
    for (unsigned i = 0; i < g.processes; i++)
        out[i] = (Process){g.process[i].pid, (u64)g.process[i].mib << 20, -1u, -1u};
    return OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *out) { *count = 0; return OK; }
int nvmlEventSetCreate(void **set) {
    *set = calloc(1, sizeof(unsigned)); return read_gpus(NULL, *set, NULL, NULL) < 0 ? NO_DRIVER : OK;
}
int nvmlEventSetFree(void *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(void *handle, u64 types, void *set) { GPU; return OK; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned wait_ms) {
    for (unsigned waited = 0; waited <= wait_ms; waited += 20, usleep(20000)) {
        unsigned handle = 0, xid = 0;
        read_gpus(NULL, set, &handle, &xid);
        if (handle) {
            ++*(unsigned *)set; event->device = (void *)(long)handle; event->type = 8; event->data = xid; return OK;
        }
    }
    return TIMEOUT;
}
