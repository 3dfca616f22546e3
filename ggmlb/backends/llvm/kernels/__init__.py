"""The kernels: functions that write LLVM code for one op, type and instruction set."""
