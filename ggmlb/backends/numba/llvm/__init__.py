"""Machine code for kernels: LLVM through llvmlite, Numba's own code generator."""
