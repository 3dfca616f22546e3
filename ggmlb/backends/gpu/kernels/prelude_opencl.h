/* The portable kernel dialect, OpenCL C 1.2 side; prelude_cuda.h is the CUDA side.

   The host defines WG, the work-group size: a power of two, 1 on CPU-type devices. There, each work-item has whole rows, the
   compiler vectorises its loops, and ON_CPU is defined. LANES, a power of two, is defined where rows share a work-group.
   PoCL before 4.0 never inlines its builtins: with ON_CPU the common ones are written out. */
#ifdef OWN_BUILTINS
#include "builtins.h"
#endif
#pragma OPENCL FP_CONTRACT ON

#define KERNEL       __kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
#define DEVICE_FN    static inline
#define GLOBAL       __global
#define CGLOBAL      __global const
#define CONSTANT     __constant
#define TABLE        __constant
/* OUTLINED: for work-groups of one item, the kernel body is a separate function (source.py), with private arrays as local.
   LOCAL_ID is a variable that is 0, not a constant: with loops known to start at 0, PoCL's attention is a tenth slower. */
#ifdef OUTLINED
enum { local_id_ = 0 };
#define LOCAL
#define LOCAL_ID     local_id_
#define GROUP_ID(d)  group_##d##_
#define NUM_GROUPS(d) n_groups_##d##_
#define BARRIER()
#define BARRIER_ALL()
#define BODY(...) static __attribute__((noinline)) void body_(__VA_ARGS__, const args_t_ *given_, int local_id_, \
    int group_0_, int group_1_, int group_2_, int n_groups_0_, int n_groups_1_, int n_groups_2_)
#define IDS_ (int)get_local_id(0), (int)get_group_id(0), (int)get_group_id(1), (int)get_group_id(2), \
    (int)get_num_groups(0), (int)get_num_groups(1), (int)get_num_groups(2)
#else
#define LOCAL        __local
#define LOCAL_ID     ((int)get_local_id(0))
#define GROUP_ID(d)  ((int)get_group_id(d))
#define NUM_GROUPS(d) ((int)get_num_groups(d))
#define BARRIER()    barrier(CLK_LOCAL_MEM_FENCE)
#define BARRIER_ALL() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#endif
#define LOCAL_ARRAY(T, name, n) LOCAL T name[n] __attribute__((aligned(64)))
#define UNROLL       __attribute__((opencl_unroll_hint))
#define IS_FIRST_TO_SET(p) (atomic_cmpxchg((volatile GLOBAL int *)(p), 0, 1) == 0)

typedef char  i8_t;
typedef long  i64_t;
typedef ulong u64_t;
#define PACKED_ARGS

#define AS_FLOAT(u)  as_float(u)
#define AS_UINT(f)   as_uint(f)
#define FMA(a, b, c) ((a)*(b) + (c))     /* a multiply-add that compilers contract; mad() is a call on PoCL */
DEVICE_FN float PRODUCT(float a, float b)     /* a b, which compilers never contract to an FMA */
{
    _Pragma("OPENCL FP_CONTRACT OFF")
    return a*b;
}

/* Clang builtins need the processor's code generator, which PoCL has; Intel's and Mesa's clang emit SPIR-V. */
#if defined(__clang__) && !defined(__SPIR__) && !defined(__SPIRV__)
#define COMPILES_FOR_CPU_
#endif
#if defined(ON_CPU) && defined(COMPILES_FOR_CPU_)
#define REASSOCIATE  _Pragma("clang fp reassociate(on)")   /* the compiler may reorder sums in the next block */
#define VECTORIZE    _Pragma("clang loop vectorize(assume_safety)")   /* the next loop's iterations are independent */
#define SQRT(x)      __builtin_sqrtf(x)
#define FABS(x)      __builtin_fabsf(x)
#define FLOOR(x)     __builtin_floorf(x)
#define CEIL(x)      __builtin_ceilf(x)
#define TRUNC(x)     __builtin_truncf(x)
#define FMAX(a, b)   ((a) > (b) ? (a) : (b))
#define FMIN(a, b)   ((a) < (b) ? (a) : (b))
#define LOAD_HALF(p)     __builtin_load_halff((__global const half *)(p))
#define STORE_HALF(p, v) __builtin_store_halff((v), (__global half *)(p))
typedef float f8u_ __attribute__((ext_vector_type(8), aligned(4)));
typedef uchar u8u_ __attribute__((ext_vector_type(8), aligned(1)));
#define LOAD8(p)      ((float8)(*(const __global f8u_ *)(p)))
#define LOAD8_L(p)    ((float8)(*(const LOCAL f8u_ *)(p)))
#define STORE8(p, v)  (*(__global f8u_ *)(p) = (v))
#define STORE8_L(p, v) (*(LOCAL f8u_ *)(p) = (v))
#define LOAD_U8(p)    ((uchar8)(*(const __global u8u_ *)(p)))
#define F8_FROM_U8(q) __builtin_convertvector(__builtin_convertvector((q), int8), float8)
#define F8_FROM_I8(q) __builtin_convertvector(__builtin_convertvector(__builtin_astype((q), char8), int8), float8)
#define F8_FROM_BITS(b) __builtin_convertvector((int8)(b) >> (int8)(0, 1, 2, 3, 4, 5, 6, 7) & 1, float8)
#else
#define REASSOCIATE
#define VECTORIZE
#define SQRT(x)      sqrt(x)
#define FABS(x)      fabs(x)
#define FLOOR(x)     floor(x)
#define CEIL(x)      ceil(x)
#define TRUNC(x)     trunc(x)
#define FMAX(a, b)   fmax((a), (b))
#define FMIN(a, b)   fmin((a), (b))
#define LOAD_HALF(p)     vload_half(0, (__global const half *)(p))
#define STORE_HALF(p, v) vstore_half((v), 0, (__global half *)(p))
#define LOAD8(p)      vload8(0, (p))
#define LOAD8_L(p)    vload8(0, (p))
#define STORE8(p, v)  vstore8((v), 0, (p))
#define STORE8_L(p, v) vstore8((v), 0, (p))
#define LOAD_U8(p)    vload8(0, (p))
#define F8_FROM_U8(q) convert_float8(q)
#define F8_FROM_I8(q) convert_float8(as_char8(q))
#define F8_FROM_BITS(b) convert_float8((int8)(b) >> (int8)(0, 1, 2, 3, 4, 5, 6, 7) & 1)
#endif
/* half bits are read through bytes, which may alias any type; words may be unaligned */
typedef uchar two_bytes_[2] __attribute__((aligned(2)));
DEVICE_FN float HALF_FROM_BITS(ushort u)
{
    const two_bytes_ b = {(uchar)u, (uchar)(u >> 8)};
    return vload_half(0, (const half *)b);
}
DEVICE_FN ushort HALF_BITS(float f)
{
    two_bytes_ b;
    vstore_half(f, 0, (half *)b);
    return (ushort)(b[0] | b[1] << 8);
}
#define LOAD_UINT4(p) vload4(0, (CGLOBAL uint *)(p))
#define LOAD_UINT2(p) vload2(0, (CGLOBAL uint *)(p))
#define STORE_UINT4(p, v) vstore4((v), 0, (GLOBAL uint *)(p))
#define STORE_UINT2(p, v) vstore2((v), 0, (GLOBAL uint *)(p))
#define MAKE_UINT4(x, y, z, w) (uint4)(x, y, z, w)
#define MAKE_UINT2(x, y) (uint2)(x, y)

#define RSQRT(x)     (1.0f/SQRT(x))
#define POW(x, y)    pow((x), (y))
#define SIN(x)       sin(x)
#define COS(x)       cos(x)
#define LOG(x)       log(x)
#define LOG1P(x)     log1p(x)
#ifdef ON_CPU
#include "math_cpu.h"
#else
#define ROUND(x)     round(x)
#define EXP(x)       exp(x)
#define EXPM1(x)     expm1(x)
#define TANH(x)      tanh(x)
#define ERF(x)       erf(x)
#endif

/* vectors of eight floats or bytes */
#define LOAD_U8_ALIGNED(p) (*(CGLOBAL uchar8 *)(p))
typedef float8 F8;
typedef uchar8 U8;
#define F8_SPLAT(x)  ((float8)(x))
#define U8_SPLAT(x)  ((uchar8)(x))
#define AT8(x, j)    x.s##j
#define U8_FROM_WORD(w) as_uchar8(w)
/* negate the elements whose bits are set */
#define F8_NEGATED(v, b) as_float8(as_uint8(v) ^ ((uint8)(b) << (uint8)(31, 30, 29, 28, 27, 26, 25, 24) & 0x80000000u))
#define MAKE_F8(E)   ((float8)(E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7)))
#define MAKE_U8(E)   ((uchar8)(E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7)))
/* look up elements of a table of 16 signed bytes */
#if defined(ON_CPU) && defined(COMPILES_FOR_CPU_) && defined(__SSSE3__)
DEVICE_FN F8 F8_LOOKUP(__constant char *table, U8 q)
{
    const char16 t = *(__constant char16 *)table;
    const uchar16 places = (uchar16)(q, q);
    return F8_FROM_I8(__builtin_astype(__builtin_ia32_pshufb128(t, __builtin_astype(places, char16)), uchar16).lo);
}
#else
#define LOOKUP_(j) (float)table[AT8(q, j)]
DEVICE_FN F8 F8_LOOKUP(__constant char *table, U8 q) { return MAKE_F8(LOOKUP_); }
#endif
DEVICE_FN float F8_SUM(F8 v) { const float4 s = v.lo + v.hi; const float2 t = s.lo + s.hi; return t.x + t.y; }

/* Reduce over the LANES work-items of a row; each gets the result; also a barrier. s: LOCAL float[WG]. Always inlined: PoCL
   3.0 makes a local array that a function accesses static, shared by all groups (docs/opencl-faults.md). */
#ifndef LANES
#define LANES WG
#endif
#if WG == 1
#define WG_REDUCE_(OP) return x;
#else
#define WG_REDUCE_(OP) const int l_ = LOCAL_ID; BARRIER(); s[l_] = x; BARRIER(); \
    for (int n_ = LANES/2; n_ > 0; n_ >>= 1) { if (l_ % LANES < n_) s[l_] = OP(s[l_], s[l_ + n_]); BARRIER(); } \
    return s[l_ - l_ % LANES];
#endif
#define ADD_(a, b) ((a) + (b))
__attribute__((always_inline)) DEVICE_FN float WG_REDUCE_ADD(float x, LOCAL float *s) { WG_REDUCE_(ADD_) }
__attribute__((always_inline)) DEVICE_FN float WG_REDUCE_MAX(float x, LOCAL float *s) { WG_REDUCE_(FMAX) }
__attribute__((always_inline)) DEVICE_FN int WG_REDUCE_ADD_INT(int x, LOCAL int *s) { WG_REDUCE_(ADD_) }
__attribute__((always_inline)) DEVICE_FN int WG_REDUCE_MAX_INT(int x, LOCAL int *s) { WG_REDUCE_(max) }
