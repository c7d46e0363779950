// What a library says of itself; setup.py defines both.
#include "kernels.h"

const char *pdrt_isa(void) { return PDRT_ISA; }

const char *pdrt_interface(void) { return PDRT_INTERFACE; }
