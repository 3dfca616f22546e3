"""The kernels: functions that emit LLVM code for one op, type and instruction set."""
