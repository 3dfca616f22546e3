/* The portable kernel dialect, CUDA C++ side (NVRTC or nvcc); prelude_opencl.h is the OpenCL side.

   Needs no header: half conversions are PTX. The host defines WG, the block size: 1, or a multiple of 32; and LANES, the
   threads per row where rows share a block: a power of two, up to 32.
   MIN_BLOCKS_PER_SM is the second argument of __launch_bounds__; 0 lets kernels use all registers that they need, where the
   compiler would spill for the sake of occupancy. */

#define MIN_BLOCKS_PER_SM 0
#define KERNEL       extern "C" __global__ __launch_bounds__(WG, MIN_BLOCKS_PER_SM) void
#define DEVICE_FN    static __device__ __forceinline__
#define GLOBAL
#define CGLOBAL      const
#define LOCAL
#define CONSTANT     static __constant__ const
#define TABLE        static __device__ const     /* read at indices that differ in a warp, which constant memory serves one by one */
#define LOCAL_ARRAY(T, name, n) __shared__ T name[n]
#define DIM_0_ x
#define DIM_1_ y
#define DIM_2_ z
#define DIM_(v, d)   v.DIM_##d##_
#define LOCAL_ID     ((int)threadIdx.x)
#define GROUP_ID(d)  ((int)DIM_(blockIdx, d))
#define NUM_GROUPS(d) ((int)DIM_(gridDim, d))
#define BARRIER()    __syncthreads()
#define BARRIER_ALL() __syncthreads()
#define UNROLL       _Pragma("unroll")
#define IS_FIRST_TO_SET(p) (atomicCAS((int *)(p), 0, 1) == 0)
#define REASSOCIATE
#define VECTORIZE

typedef signed char i8_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef long long i64_t;
typedef unsigned long long u64_t;

#include "ptx.h"
#define LOAD_HALF(p)     half_to_float_(*(const ushort *)(p))
#define STORE_HALF(p, v) (*(ushort *)(p) = float_to_half_(v))

#define HALF_FROM_BITS(u) half_to_float_(u)
#define HALF_BITS(f) float_to_half_(f)
/* vector loads and stores at aligned addresses */
#define LOAD_UINT4(p) (*(const uint4 *)(p))
#define LOAD_UINT2(p) (*(const uint2 *)(p))
#define STORE_UINT4(p, v) (*(uint4 *)(p) = (v))
#define STORE_UINT2(p, v) (*(uint2 *)(p) = (v))
#define MAKE_UINT4(x, y, z, w) make_uint4(x, y, z, w)
#define MAKE_UINT2(x, y) make_uint2(x, y)

#define AS_FLOAT(u)  __uint_as_float(u)
#define AS_UINT(f)   __float_as_uint(f)
#define FMA(a, b, c) fmaf((a), (b), (c))
#define PRODUCT(a, b) __fmul_rn((a), (b))     /* a b, which compilers never contract to an FMA */
#define SQRT(x)      sqrtf(x)
#define RSQRT(x)     rsqrtf(x)
#define FABS(x)      fabsf(x)
#define FLOOR(x)     floorf(x)
#define CEIL(x)      ceilf(x)
#define TRUNC(x)     truncf(x)
#define ROUND(x)     roundf(x)
#define FMAX(a, b)   fmaxf((a), (b))
#define FMIN(a, b)   fminf((a), (b))
#define POW(x, y)    powf((x), (y))
#define SIN(x)       sinf(x)
#define COS(x)       cosf(x)
#define LOG(x)       logf(x)
#define LOG1P(x)     log1pf(x)
#define EXP(x)       expf(x)
#define EXPM1(x)     expm1f(x)
#define TANH(x)      tanhf(x)
#define ERF(x)       erff(x)

/* vectors of eight floats or bytes, with the operators that OpenCL C has built in */
template <typename T> struct eight_ { T v[8]; };
typedef eight_<float> F8;
typedef eight_<uchar> U8;
#define AT8(x, j)    x.v[j]
#define EACH_OF_8_(expr) UNROLL for (int j_ = 0; j_ < 8; j_++) { expr; }
#define EIGHT_OPERATOR_(OP) \
    template <typename T> DEVICE_FN eight_<T> operator OP(eight_<T> a, eight_<T> b) \
    { EACH_OF_8_(a.v[j_] = (T)(a.v[j_] OP b.v[j_])) return a; } \
    template <typename T, typename S> DEVICE_FN eight_<T> operator OP(eight_<T> a, S b) \
    { EACH_OF_8_(a.v[j_] = (T)(a.v[j_] OP (T)b)) return a; } \
    template <typename T> DEVICE_FN eight_<T> &operator OP##=(eight_<T> &a, eight_<T> b) { return a = a OP b; }
EIGHT_OPERATOR_(+)
EIGHT_OPERATOR_(-)
EIGHT_OPERATOR_(*)
EIGHT_OPERATOR_(&)
EIGHT_OPERATOR_(|)
EIGHT_OPERATOR_(<<)
EIGHT_OPERATOR_(>>)
DEVICE_FN F8 operator*(float a, F8 b) { return b*a; }
template <typename T> DEVICE_FN eight_<T> make_eight_(T a, T b, T c, T d, T e, T f, T g, T h)
{ eight_<T> r = {{a, b, c, d, e, f, g, h}}; return r; }
#define MAKE_F8(E)   make_eight_<float>(E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7))
#define MAKE_U8(E)   make_eight_<uchar>(E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7))
#define SPLAT_(j)    x_
DEVICE_FN F8 F8_SPLAT(float x_) { return MAKE_F8(SPLAT_); }
DEVICE_FN U8 U8_SPLAT(uchar x_) { return MAKE_U8(SPLAT_); }
DEVICE_FN F8 LOAD8(const float *p) { F8 r; EACH_OF_8_(r.v[j_] = p[j_]) return r; }
DEVICE_FN void STORE8(float *p, F8 v) { EACH_OF_8_(p[j_] = v.v[j_]) }
#define LOAD8_L(p)   LOAD8(p)
#define STORE8_L(p, v) STORE8((p), (v))
DEVICE_FN U8 LOAD_U8(const uchar *p) { U8 r; EACH_OF_8_(r.v[j_] = p[j_]) return r; }
DEVICE_FN U8 U8_FROM_WORD(u64_t w) { U8 r; EACH_OF_8_(r.v[j_] = (uchar)(w >> 8*j_)) return r; }
DEVICE_FN U8 LOAD_U8_ALIGNED(const uchar *p) { return U8_FROM_WORD(*(const u64_t *)p); }
/* byte to float by way of the mantissa of 2^23: the conversion instruction has a quarter of the throughput */
DEVICE_FN F8 F8_FROM_U8(U8 q) { F8 r; EACH_OF_8_(r.v[j_] = AS_FLOAT(0x4b000000u | q.v[j_]) - 8388608.0f) return r; }
DEVICE_FN F8 F8_FROM_I8(U8 q)
{ F8 r; EACH_OF_8_(r.v[j_] = AS_FLOAT(0x4b000000u | (q.v[j_] ^ 0x80u)) - 8388736.0f) return r; }
DEVICE_FN F8 F8_FROM_BITS(uint b) { F8 r; EACH_OF_8_(r.v[j_] = (float)(b >> j_ & 1u)) return r; }
/* negate the elements whose bits are set */
DEVICE_FN F8 F8_NEGATED(F8 v, uint b) { EACH_OF_8_(v.v[j_] = AS_FLOAT(AS_UINT(v.v[j_]) ^ (b << (31 - j_) & 0x80000000u))) return v; }
DEVICE_FN F8 F8_LOOKUP(const i8_t *table, U8 q) { F8 r; EACH_OF_8_(r.v[j_] = (float)table[q.v[j_]]) return r; }
DEVICE_FN float F8_SUM(F8 a)
{ return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }

/* Reduce over the LANES threads of a row; each gets the result. With LANES of 32 or more it is a block barrier, too.
   s: LOCAL float[WG], or int[WG] */
#ifndef LANES
#define LANES WG
#endif
#define WARP_REDUCE_(OP) \
    UNROLL for (int o_ = LANES < 32 ? LANES/2 : 16; o_ > 0; o_ >>= 1) x = OP(x, __shfl_xor_sync(0xffffffffu, x, o_));
#if WG == 1
#define WG_REDUCE_(OP, ID) return x;
#elif LANES < 32   /* only warp shuffles: rows that less than a warp shares are in registers and need no barrier */
#define WG_REDUCE_(OP, ID) WARP_REDUCE_(OP) return x;
#else
#define WG_REDUCE_(OP, ID) WARP_REDUCE_(OP) if (LANES > 32) { const int l_ = LOCAL_ID; __syncthreads(); \
    if ((l_ & 31) == 0) s[l_ >> 5] = x; __syncthreads(); \
    x = (l_ & 31) < WG/32 ? s[l_ & 31] : (ID); WARP_REDUCE_(OP) } else __syncwarp(); return x;
#endif
#define ADD_(a, b) ((a) + (b))
DEVICE_FN float WG_REDUCE_ADD(float x, float *s) { WG_REDUCE_(ADD_, 0.0f) }
DEVICE_FN float WG_REDUCE_MAX(float x, float *s) { WG_REDUCE_(fmaxf, AS_FLOAT(0xff800000u)) }
DEVICE_FN int WG_REDUCE_ADD_INT(int x, int *s) { WG_REDUCE_(ADD_, 0) }
DEVICE_FN int WG_REDUCE_MAX_INT(int x, int *s) { WG_REDUCE_(max, -2147483647 - 1) }
