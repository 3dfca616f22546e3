/* CUDA C++ on the host: the kernels' own text, a block at a time, each thread a coroutine of its own.

   What is CUDA's stands here as plain C++: qualifiers, indices, intrinsics, barriers, shuffles. A thread runs until
   it waits for others of its warp or block; then the next one has its turn, from the first to the last or, as
   asked, the other way, so that a missing barrier shows as a difference. Errors end the launch with a reason:
   a barrier that some threads cannot reach, an access outside the memory of the tensors, one that is not aligned
   (the compiler plants traps). Shared memory is filled with NaN before each block. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>

namespace emulator {
enum State { READY, AT_BLOCK, AT_WARP, DONE };
struct Dim { unsigned x, y, z; };
struct Thread {
    ucontext_t start;
    jmp_buf here;
    bool began;
    State state;
    unsigned mask;
};
const size_t STACK = 256 << 10;
static Thread threads[1024];
static uint64_t slots[1024][8];        /* what a lane shows to its warp */
static jmp_buf scheduler;
static sigjmp_buf fatal;
static int n_threads, self;
static char reason[256];
static void (*body)(void **);
static void **arguments;
static Dim thread_index, block_index, grid_size, block_size;

static void wait_for(State state, unsigned mask)
{
    threads[self].state = state;
    threads[self].mask = mask;
    if (!_setjmp(threads[self].here)) _longjmp(scheduler, 1);
}
static void block_barrier() { wait_for(AT_BLOCK, 0); }
static void warp_barrier(unsigned mask) { wait_for(AT_WARP, mask); }
static int lane() { return self & 31; }
static uint64_t *of_lane(int l) { return slots[(self & ~31) + l]; }

static void thread_main()
{
    body(arguments);
    threads[self].state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(int t)
{
    self = t;
    thread_index = {(unsigned)t, 0, 0};
    if (_setjmp(scheduler)) return;
    if (threads[t].began) _longjmp(threads[t].here, 1);
    threads[t].began = true;
    setcontext(&threads[t].start);
}

/* let go those that everyone they wait for has reached; says whether any was */
static bool release()
{
    bool any = false;
    int at_block = 0, alive = 0;
    for (int t = 0; t < n_threads; t++) {
        alive += threads[t].state != DONE;
        at_block += threads[t].state == AT_BLOCK;
    }
    if (alive && at_block == alive) {
        for (int t = 0; t < n_threads; t++) if (threads[t].state == AT_BLOCK) threads[t].state = READY;
        return true;
    }
    for (int w = 0; w < n_threads; w += 32) {
        for (int l = 0; l < 32; l++) {
            if (threads[w + l].state != AT_WARP) continue;
            const unsigned mask = threads[w + l].mask;
            bool all = true;
            for (int o = 0; o < 32; o++)
                if (mask >> o & 1) all &= threads[w + o].state == AT_WARP && threads[w + o].mask == mask;
            if (!all) continue;
            for (int o = 0; o < 32; o++) if (mask >> o & 1) threads[w + o].state = READY;
            any = true;
        }
    }
    return any;
}

extern "C" char __start_shared_memory[] __attribute__((weak));
extern "C" char __stop_shared_memory[] __attribute__((weak));

static bool run_block(bool backwards, char *stacks)
{
    if (__start_shared_memory) memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    for (int t = 0; t < n_threads; t++) {
        getcontext(&threads[t].start);
        threads[t].start.uc_stack.ss_sp = stacks + t*STACK;
        threads[t].start.uc_stack.ss_size = STACK;
        threads[t].start.uc_link = nullptr;
        makecontext(&threads[t].start, thread_main, 0);
        threads[t].began = false;
        threads[t].state = READY;
    }
    for (;;) {
        bool alive = false;
        for (int i = 0; i < n_threads; i++) {
            const int t = backwards ? n_threads - 1 - i : i;
            if (threads[t].state == READY) resume(t);
            alive |= threads[t].state != DONE;
        }
        if (!alive) return true;
        if (!release()) {
            for (int t = 0; t < n_threads; t++) {
                if (threads[t].state == DONE) continue;
                snprintf(reason, sizeof reason, "thread %d of block (%u, %u, %u) waits at a %s barrier that others never reach",
                         t, block_index.x, block_index.y, block_index.z, threads[t].state == AT_WARP ? "warp's" : "block's");
                break;
            }
            return false;
        }
    }
}

static void on_signal(int number, siginfo_t *info, void *)
{
    snprintf(reason, sizeof reason, "thread %d of block (%u, %u, %u): %s at %p", self, block_index.x, block_index.y,
             block_index.z, number == SIGSEGV || number == SIGBUS ? "access outside of all tensors"
             : "misaligned access, index out of bounds, or shift too far", info->si_addr);
    siglongjmp(fatal, 1);
}

static const char *launch(void (*kernel)(void **), void **args, int wg, const int *groups, int backwards)
{
    static char *stacks = nullptr;
    static char *signal_stack = nullptr;
    if (!stacks) {
        stacks = (char *)mmap(nullptr, 1024*STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        signal_stack = (char *)malloc(64 << 10);
    }
    body = kernel;
    arguments = args;
    n_threads = wg;
    grid_size = {(unsigned)groups[0], (unsigned)groups[1], (unsigned)groups[2]};
    block_size = {(unsigned)wg, 1, 1};
    reason[0] = 0;
    const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
    struct sigaction before[5], action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t old_stack, new_stack;
    memset(&new_stack, 0, sizeof new_stack);
    new_stack.ss_sp = signal_stack;
    new_stack.ss_size = 64 << 10;
    sigaltstack(&new_stack, &old_stack);
    for (int i = 0; i < 5; i++) sigaction(numbers[i], &action, &before[i]);
    if (!sigsetjmp(fatal, 1)) {
        bool fine = true;
        for (unsigned z = 0; z < grid_size.z && fine; z++)
            for (unsigned y = 0; y < grid_size.y && fine; y++)
                for (unsigned x = 0; x < grid_size.x && fine; x++) {
                    block_index = {x, y, z};
                    fine = run_block(backwards, stacks);
                }
    }
    for (int i = 0; i < 5; i++) sigaction(numbers[i], &before[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return reason[0] ? reason : nullptr;
}

template <typename... P, size_t... I>
static void call(void (*kernel)(P...), void **args, std::index_sequence<I...>) { kernel(*(P *)args[I]...); }
template <typename... P>
static void call(void (*kernel)(P...), void **args) { call(kernel, args, std::index_sequence_for<P...>()); }

template <typename T> static T exchange(unsigned mask, T value, int from)
{
    memcpy(of_lane(lane()), &value, sizeof value);
    warp_barrier(mask);
    T result;
    memcpy(&result, of_lane(from & 31), sizeof result);
    warp_barrier(mask);
    return result;
}
static bool any(unsigned mask, bool mine)
{
    uint64_t value = mine;
    memcpy(of_lane(lane()), &value, sizeof value);
    warp_barrier(mask);
    bool result = false;
    for (int l = 0; l < 32; l++) result |= (mask >> l & 1) && *of_lane(l);
    warp_barrier(mask);
    return result;
}
}   /* namespace emulator */

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __constant__
#define __shared__ static __attribute__((section("shared_memory")))
#define __align__(n) alignas(n)
#define __restrict__
#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size
#define blockDim emulator::block_size
#define __syncthreads() emulator::block_barrier()
#define __syncwarp(...) emulator::warp_barrier(0xffffffffu)
#define __shfl_xor_sync(mask, v, o) emulator::exchange((mask), (v), emulator::lane() ^ (o))
#define __shfl_sync(mask, v, from) emulator::exchange((mask), (v), (from))
#define __shfl_down_sync(mask, v, o) emulator::exchange((mask), (v), emulator::lane() + (o) < 32 ? emulator::lane() + (o) : emulator::lane())
#define __any_sync(mask, v) emulator::any((mask), (v))
#define __threadfence()

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
static inline int __float2int_rn(float x) { return (int)rintf(x); }
