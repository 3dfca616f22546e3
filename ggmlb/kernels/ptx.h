/* What CUDA C++ has no name for without its header files, as PTX. All inline assembly stands here. */
DEVICE_FN float half_to_float_(ushort h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE_FN ushort float_to_half_(float f) { ushort h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }

/* 16 aligned bytes that are read once, and are better not kept in the first cache */
DEVICE_FN uint4 load16_once(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
