/* What pdrt/kv/cuda.py calls of libcudart, over host memory: two processes can share it, copies are
 * in place only once their event has been waited for, and each call can be made to fail or to hang.
 *
 * Stricter than CUDA in one respect: a thread that has not chosen its device is refused, where CUDA
 * would take the first one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int cudaError_t;
typedef struct stream *cudaStream_t;
typedef struct event *cudaEvent_t;
enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorDeviceUninitialized = 201,
    cudaErrorInvalidResourceHandle = 400,
};
enum { DEVICES = 2, ALLOCATIONS_MAX = 64, COPIES_MAX = 4096, ATTRIBUTES_MAX = 256 };

/* Allocated here, or mapped from another process. */
struct allocation {
    char *address;
    size_t size;
    int fd;
};
static struct allocation allocations[ALLOCATIONS_MAX];

struct copy {
    void *target;
    const void *source;
    size_t size;
};
struct stream {
    struct copy copies[COPIES_MAX];
    int count;
};
struct event {
    cudaStream_t stream;
    int count; /* of the stream's copies, when it was recorded */
};

/* cudaIpcMemHandle_t, 64 bytes. */
typedef struct {
    pid_t pid;
    int fd;
    size_t size;
    char rest[48];
} cudaIpcMemHandle_t;
_Static_assert(sizeof(cudaIpcMemHandle_t) == 64, "CUDA_IPC_HANDLE_SIZE");

static _Thread_local int device = -1;
static _Thread_local cudaError_t last_error;
static int attributes[ATTRIBUTES_MAX];
static char failing[64];
static int failing_after;
static cudaError_t failing_with;
static atomic_int is_held, waiting;

/* For the tests */

/* The call `name`, after so many that succeed, fails with `status`, and so do all after it. */
void fake_fail(const char *name, int after, int status) {
    snprintf(failing, sizeof failing, "%s", name);
    failing_after = after;
    failing_with = status;
}

/* Copies do not end while they are held. */
void fake_hold(int hold) { is_held = hold; }

/* Threads that wait for an event. */
int fake_waiting(void) { return waiting; }

void fake_set_attribute(int attribute, int value) { attributes[attribute] = value; }

/* Allocations and mappings that have not been given back. */
int fake_allocations(void) {
    int count = 0;
    for (int i = 0; i < ALLOCATIONS_MAX; i++) count += allocations[i].address != NULL;
    return count;
}

static cudaError_t end(const char *name, cudaError_t status) {
    if (strcmp(name, failing) == 0 && failing_after-- <= 0) status = failing_with;
    if (device < 0) status = cudaErrorInvalidDevice;
    if (status != cudaSuccess) last_error = status;
    return status;
}

static struct allocation *find(const void *address) {
    for (int i = 0; i < ALLOCATIONS_MAX; i++)
        if (allocations[i].address == address) return &allocations[i];
    return NULL;
}

static cudaError_t map(int fd, size_t size, void **address) {
    struct allocation *free_place = find(NULL);
    if (free_place == NULL) return cudaErrorMemoryAllocation;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
    *free_place = (struct allocation){mapped, size, fd};
    *address = mapped;
    return cudaSuccess;
}

static cudaError_t unmap(void *address) {
    struct allocation *found = address == NULL ? NULL : find(address);
    if (found == NULL) return cudaErrorInvalidValue;
    munmap(found->address, found->size);
    close(found->fd);
    *found = (struct allocation){0};
    return cudaSuccess;
}

/* CUDA's */

cudaError_t cudaSetDevice(int index) {
    if (index < 0 || index >= DEVICES) return last_error = cudaErrorInvalidDevice;
    device = index;
    return end("cudaSetDevice", cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int index) {
    if (index != device) return last_error = cudaErrorInvalidDevice;
    *value = attributes[attribute];
    return end("cudaDeviceGetAttribute", cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int index) {
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x1B + index);
    return end("cudaDeviceGetPCIBusId", cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void) { return end("cudaDeviceSynchronize", cudaSuccess); }

cudaError_t cudaMalloc(void **address, size_t size) {
    cudaError_t status = end("cudaMalloc", cudaSuccess);
    if (status != cudaSuccess) return status;
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (ftruncate(fd, (off_t)size) != 0) return last_error = cudaErrorMemoryAllocation;
    return map(fd, size, address);
}

cudaError_t cudaMemset(void *address, int value, size_t size) {
    struct allocation *found = find(address);
    if (found == NULL || size > found->size) return last_error = cudaErrorInvalidValue;
    memset(address, value, size);
    return end("cudaMemset", cudaSuccess);
}

cudaError_t cudaFree(void *address) { return end("cudaFree", unmap(address)); }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    struct allocation *found = find(address);
    if (found == NULL) return last_error = cudaErrorInvalidValue;
    *handle = (cudaIpcMemHandle_t){.pid = getpid(), .fd = found->fd, .size = found->size};
    return end("cudaIpcGetMemHandle", cudaSuccess);
}

cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags) {
    char path[64];
    cudaError_t status = end("cudaIpcOpenMemHandle", cudaSuccess);
    if (status != cudaSuccess) return status;
    if (flags != 1) return last_error = cudaErrorInvalidValue;
    if (handle.pid == getpid()) return last_error = cudaErrorDeviceUninitialized;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return last_error = cudaErrorInvalidResourceHandle;
    return map(fd, handle.size, address);
}

cudaError_t cudaIpcCloseMemHandle(void *address) {
    return end("cudaIpcCloseMemHandle", unmap(address));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    if (flags != 1) return last_error = cudaErrorInvalidValue;
    *stream = calloc(1, sizeof **stream);
    return end("cudaStreamCreateWithFlags", cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (flags != 3) return last_error = cudaErrorInvalidValue;
    *event = calloc(1, sizeof **event);
    return end("cudaEventCreateWithFlags", cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, int kind,
                            cudaStream_t stream) {
    cudaError_t status = end("cudaMemcpyAsync", cudaSuccess);
    if (status != cudaSuccess) return status;
    if (kind != 4 || stream->count == COPIES_MAX) return last_error = cudaErrorInvalidValue;
    stream->copies[stream->count++] = (struct copy){target, source, size};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    *event = (struct event){stream, stream->count};
    return end("cudaEventRecord", cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    waiting++;
    while (is_held) usleep(1000);
    waiting--;
    cudaError_t status = end("cudaEventSynchronize", cudaSuccess);
    if (status != cudaSuccess) return status;
    for (int i = 0; i < event->count; i++) {
        struct copy *copy = &event->stream->copies[i];
        memcpy(copy->target, copy->source, copy->size);
    }
    event->stream->count = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t status = last_error;
    last_error = cudaSuccess;
    return status;
}

const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorMemoryAllocation ? "out of memory" : "an error on purpose";
}
