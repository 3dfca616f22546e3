/* CUDA C++ on the host: what is CUDA's stands here as plain C++, above runtime.cpp: qualifiers, indices, intrinsics,
   barriers, shuffles. Each barrier of a text has a number of its own, so that threads that wait at different ones show. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include <utility>
#include "runtime.h"

namespace emulator {
#define UNCHECKED __attribute__((no_sanitize("thread")))

template <typename... P, size_t... I>
UNCHECKED static void call(void (*kernel)(P...), void **args, std::index_sequence<I...>) { kernel(*(P *)args[I]...); }
template <typename... P>
UNCHECKED static void call(void (*kernel)(P...), void **args) { call(kernel, args, std::index_sequence_for<P...>()); }

template <typename P> constexpr signed char kind()
{ return !std::is_pointer<P>::value ? -1 : !std::is_const<std::remove_pointer_t<P>>::value; }

extern "C" char __start_shared_memory[] __attribute__((weak));
extern "C" char __stop_shared_memory[] __attribute__((weak));
extern "C" char __start_constant_memory[] __attribute__((weak));
extern "C" char __stop_constant_memory[] __attribute__((weak));

template <typename... P>
UNCHECKED static const char *launch(void (*kernel)(P...), void (*body)(void **), void **args, int wg, const int *groups, unsigned order,
                          const Span *spans)
{
    static const signed char kinds[] = {kind<P>()...};
    const Launch l = {body, args, kinds, sizeof...(P), wg, {groups[0], groups[1], groups[2]}, order, spans,
                      {(uint64_t)__start_shared_memory, (uint64_t)__stop_shared_memory},
                      {(uint64_t)__start_constant_memory, (uint64_t)__stop_constant_memory}};
    return emulator_launch(&l);
}

static inline int lane() { return emulator_public.self & 31; }
static inline uint64_t *of_lane(int l) { return emulator_public.slots[(emulator_public.self & ~31) + l]; }
template <typename T> UNCHECKED static T exchange(unsigned mask, int site, T value, int from)
{
    memcpy(of_lane(lane()), &value, sizeof value);
    emulator_warp_barrier(mask, site, false);
    T result;
    memcpy(&result, of_lane(from & 31), sizeof result);
    emulator_warp_barrier(mask, site, false);
    return result;
}
UNCHECKED static bool any(unsigned mask, int site, bool mine)
{
    *of_lane(lane()) = mine;
    emulator_warp_barrier(mask, site, false);
    bool result = false;
    for (int l = 0; l < 32; l++) result |= *of_lane(l) != 0;
    emulator_warp_barrier(mask, site, false);
    return result;
}
}   /* namespace emulator */

#define __global__ __attribute__((noinline))
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __constant__ __attribute__((section("constant_memory")))
#define __align__(n) alignas(n)
#define __restrict__
#define threadIdx emulator_public.thread_index
#define blockIdx emulator_public.block_index
#define gridDim emulator_public.grid_size
#define blockDim emulator_public.block_size
#define __syncthreads() emulator_block_barrier(__COUNTER__)
#define __syncwarp() emulator_warp_barrier(0xffffffffu, __COUNTER__, true)
#define __shfl_xor_sync(mask, v, o) emulator::exchange((mask), __COUNTER__, (v), emulator::lane() ^ (o))
#define __any_sync(mask, v) emulator::any((mask), __COUNTER__, (v))

struct alignas(8)  float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8)  int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8)  uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float rsqrtf(float x) { return 1.0f/sqrtf(x); }
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) c += (int)(signed char)((unsigned)a >> 8*i)*(int)(signed char)((unsigned)b >> 8*i);
    return c;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8*(s >> 4*i & 7) & 0xff) << 8*i;
    return r;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{ return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31)); }
/* atomic accesses are in order with each other; threads run one after another here */
UNCHECKED static inline int atomicCAS(int *p, int from, int to) { const int old = *p; if (old == from) *p = to; return old; }
static inline float __fdividef(float x, float y) { return x/y; }
/* As the device rounds it: the host must not join it with an addition. */
static inline float __fmul_rn(float a, float b)
{
    volatile float product = a * b;
    return product;
}
static inline int __float2int_rn(float x) { return (int)rintf(x); }
