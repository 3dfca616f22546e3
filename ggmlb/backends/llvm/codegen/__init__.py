"""Machine code for kernels: LLVM through llvmlite."""
