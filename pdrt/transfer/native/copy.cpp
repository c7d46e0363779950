// Many ranges of host memory copied in one call, which ctypes makes without the GIL.
#include <cstdint>
#include <cstring>

#define PDRT_PUBLIC extern "C" __attribute__((visibility("default")))

// ranges: (count, 3), offset in source, offset in target and length in bytes of each.
PDRT_PUBLIC void pdrt_copy_ranges(char *target, const char *source, const int64_t *ranges,
                                  int64_t count) {
    for (const int64_t *range = ranges; range != ranges + 3 * count; range += 3)
        std::memcpy(target + range[1], source + range[0], static_cast<size_t>(range[2]));
}
