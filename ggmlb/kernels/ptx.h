/* What CUDA C++ has no name for without its header files, as PTX. All inline assembly stands here. */
DEVICE_FN float half_to_float_(ushort h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE_FN ushort float_to_half_(float f) { ushort h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
