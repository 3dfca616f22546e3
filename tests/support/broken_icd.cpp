// An OpenCL runtime with a platform for each way in which one can be of no use; see test_opencl_platforms.py.

#include <cstddef>
#include <cstring>

namespace {

constexpr int SUCCESS = 0, DEVICE_NOT_FOUND = -1, OUT_OF_HOST_MEMORY = -6, INVALID_PLATFORM = -32,
              INVALID_DEVICE = -33;
constexpr unsigned PLATFORM_EXTENSIONS = 0x0904, PLATFORM_ICD_SUFFIX = 0x0920, DEVICE_PLATFORM = 0x1031,
                   DEVICE_LOCAL_MEM_SIZE = 0x1023;

enum Fault { NO_NAME, NO_DEVICES, DEVICES_RAISE, DEVICE_RAISES, NO_CONTEXT, NO_QUEUE, N_FAULTS };

int unsupported() { return INVALID_PLATFORM; }

struct Object { // the loader reads the table; the fault is ours
    void *const *table;
    Fault fault;
};

void *const *table();

Object platforms[N_FAULTS], devices[N_FAULTS], contexts[N_FAULTS];

int give(const void *value, size_t size, size_t room, void *out, size_t *needed)
{
    if (needed)
        *needed = size;
    if (out)
        memcpy(out, value, size < room ? size : room);
    return SUCCESS;
}

int text(const char *value, size_t room, void *out, size_t *needed)
{
    return give(value, strlen(value) + 1, room, out, needed);
}

int platform_info(Object *platform, unsigned name, size_t room, void *out, size_t *needed)
{
    if (name == PLATFORM_EXTENSIONS)
        return text("cl_khr_icd", room, out, needed);
    if (name == PLATFORM_ICD_SUFFIX)
        return text("BROKEN", room, out, needed);
    if (platform->fault == NO_NAME)
        return INVALID_PLATFORM;
    // All tell the same: none may stand for the others.
    return text("OpenCL 1.2 broken", room, out, needed);
}

int device_ids(Object *platform, unsigned long, unsigned room, Object **out, unsigned *n)
{
    if (platform->fault == NO_DEVICES)
        return DEVICE_NOT_FOUND;
    if (platform->fault == DEVICES_RAISE)
        return INVALID_PLATFORM;
    if (n)
        *n = 1;
    if (out && room)
        *out = &devices[platform->fault];
    return SUCCESS;
}

int device_info(Object *device, unsigned name, size_t room, void *out, size_t *needed)
{
    static const unsigned long long yes = 1, local_memory = 65536;
    if (device->fault == DEVICE_RAISES)
        return INVALID_DEVICE;
    if (name == DEVICE_PLATFORM) {
        const Object *platform = &platforms[device->fault];
        return give(&platform, sizeof platform, room, out, needed);
    }
    if (name == DEVICE_LOCAL_MEM_SIZE)
        return give(&local_memory, sizeof local_memory, room, out, needed);
    return give(&yes, room ? room : sizeof yes, room, out, needed);
}

Object *context(const void *, unsigned, Object **of, void *, void *, int *status)
{
    const Fault fault = of[0]->fault;
    *status = fault == NO_QUEUE ? SUCCESS : OUT_OF_HOST_MEMORY;
    return fault == NO_QUEUE ? &contexts[fault] : nullptr;
}

Object *queue(Object *, Object *, unsigned long, int *status)
{
    *status = OUT_OF_HOST_MEMORY;
    return nullptr;
}

int nothing(Object *) { return SUCCESS; }

void *const *table()
{
    static void *all[256]; // in the order of cl_icd.h
    for (void *&entry : all)
        entry = reinterpret_cast<void *>(unsupported);
    all[1] = reinterpret_cast<void *>(platform_info);
    all[2] = reinterpret_cast<void *>(device_ids);
    all[3] = reinterpret_cast<void *>(device_info);
    all[4] = reinterpret_cast<void *>(context);
    all[6] = all[7] = reinterpret_cast<void *>(nothing); // retain and release a context
    all[9] = reinterpret_cast<void *>(queue);
    return all;
}

} // namespace

extern "C" {

int clGetPlatformInfo(Object *platform, unsigned name, size_t room, void *out, size_t *needed)
{
    return platform_info(platform, name, room, out, needed);
}

int clIcdGetPlatformIDsKHR(unsigned room, Object **out, unsigned *n)
{
    for (int i = 0; i < N_FAULTS; i++) {
        const Object object{table(), static_cast<Fault>(i)};
        platforms[i] = devices[i] = contexts[i] = object;
        if (out && static_cast<unsigned>(i) < room)
            out[i] = &platforms[i];
    }
    if (n)
        *n = N_FAULTS;
    return SUCCESS;
}

void *clGetExtensionFunctionAddress(const char *name)
{
    return strcmp(name, "clIcdGetPlatformIDsKHR") ? nullptr : reinterpret_cast<void *>(clIcdGetPlatformIDsKHR);
}
}
