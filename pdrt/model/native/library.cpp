// What a library says of itself, which setup.py defines, and what it needs of the system.
#include "kernels.h"

#if defined(__AMX_TILE__)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

const char *pdrt_isa(void) { return PDRT_ISA; }

const char *pdrt_interface(void) { return PDRT_INTERFACE; }

int pdrt_enable(void) {
#if defined(__AMX_TILE__)
    // Linux keeps 8 KB more for each thread of a process that may use the registers.
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return errno;
#endif
    return 0;
}
