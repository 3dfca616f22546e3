/* All inline PTX: instructions whose intrinsics need CUDA's header files. */
DEVICE_FN float half_to_float_(ushort h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE_FN ushort float_to_half_(float f) { ushort h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }

/* c + dot product of four unsigned bytes (a) and four signed bytes (b) */
DEVICE_FN int dp4a_unsigned_(int a, int b, int c)
{
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* streaming load of 16 aligned bytes, not kept in L1 */
DEVICE_FN uint4 load16_once(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

/* The beginning of a kernel of a programmatic dependent launch: blocks of the next kernel may become resident; this one waits
   until the kernel before is complete, and with it all before that. Only from sm_90 on. */
DEVICE_FN void wait_for_previous_kernel()
{
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

DEVICE_FN float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE_FN uint shared_address_(const void *p) { return (uint)__cvta_generic_to_shared(p); }

/* ldmatrix: four 8x8 matrices of halves from shared memory; thread 8i+j has the address of row j of matrix i, 16-byte aligned.
   A thread gets two neighbours of row lane/4 of each matrix, or, transposed, of column lane/4. */
DEVICE_FN void load_matrices(uint *r, const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address_(p)) : "memory");
}
DEVICE_FN void load_matrices_transposed(uint *r, const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address_(p)) : "memory");
}

/* two floats as two halves, or as two bf16 */
DEVICE_FN uint pack2_f16(float low, float high) { return (uint)float_to_half_(low) | (uint)float_to_half_(high) << 16; }
DEVICE_FN uint pack2_bf16(float low, float high)
{
#if __CUDA_ARCH__ >= 800
    uint u;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
    return u;
#else
    return pack2_f16(fminf(fmaxf(low, -65504.0f), 65504.0f), fminf(fmaxf(high, -65504.0f), 65504.0f));
#endif
}

/* mma: d (16x8, f32) += a (16x16, row-major) times b (16x8, column-major), distributed over the warp */
DEVICE_FN void multiply_add_f16(float *d, const uint *a, const uint *b)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int i = 0; i < 2; i++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2*i]), "r"(a[2*i + 1]), "r"(b[i]));
#endif
}

DEVICE_FN void multiply_add_bf16(float *d, const uint *a, const uint *b)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    multiply_add_f16(d, a, b);                /* of halves, as pack2_bf16 makes them there */
#endif
}
#if __CUDA_ARCH__ >= 800
/* mma: d = a (16x32 bytes, row-major) times b (32x8 signed bytes, column-major) + c; with HALF, of k = 16. A thread's
   register has four neighbouring k of a row or column; those of k = 16 and up follow. */
#define MULTIPLY_BYTES_(shape, type, operands, ...) \
    asm("mma.sync.aligned." shape ".row.col.s32." type ".s8.s32 {%0, %1, %2, %3}, " operands ", {%4, %5, %6, %7};" \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), __VA_ARGS__)
#define MULTIPLY_32_(type) MULTIPLY_BYTES_("m16n8k32", type, "{%8, %9, %10, %11}, {%12, %13}", \
                                           "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define MULTIPLY_16_(type) MULTIPLY_BYTES_("m16n8k16", type, "{%8, %9}, {%10}", "r"(a[0]), "r"(a[1]), "r"(b[0]))
template <bool IS_UNSIGNED, bool HALF> DEVICE_FN void multiply_bytes(int *d, const int *a, const uint *b, const int *c)
{
    if (HALF) { if (IS_UNSIGNED) MULTIPLY_16_("u8"); else MULTIPLY_16_("s8"); }
    else      { if (IS_UNSIGNED) MULTIPLY_32_("u8"); else MULTIPLY_32_("s8"); }
}
/* mma: d (16x8, f32) += a (16x8, row-major) times b (8x8, column-major); of their fractions 10 bits count */
DEVICE_FN void multiply_add_tf32(float *d, const float *a, const float *b)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
#endif

/* cp.async: copy 16 aligned bytes to shared memory, or zeros if not `valid`; copies up to a commit form a group */
#if __CUDA_ARCH__ >= 800
DEVICE_FN void copy16_async(void *to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address_(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* wait until all of this thread's groups of copies but the last n are complete */
template <int n> DEVICE_FN void copy_wait_but() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }
#else
DEVICE_FN void copy16_async(void *to, const void *from, bool valid)
{ *(uint4 *)to = valid ? load16_once(from) : make_uint4(0, 0, 0, 0); }
DEVICE_FN void copy_commit() {}
template <int n> DEVICE_FN void copy_wait_but() {}
#endif
