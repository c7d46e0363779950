"""CPU kernels in C++ behind a plain C interface (`kernels.h`), and what uses them from Python."""
