"""Code generation for kernels, by LLVM through llvmlite."""
