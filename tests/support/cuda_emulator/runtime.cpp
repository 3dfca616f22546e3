/* Runs a launch a block at a time, each thread a coroutine.

   A thread runs until it waits for others of its warp or block; then the next one has its turn, in the order that was
   asked for. What a card would punish, or forgive at random, ends the launch with a reason. */
#include "runtime.h"
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

emulator::Public emulator_public;
#define self emulator_public.self
#define block_index emulator_public.block_index

namespace emulator {
enum State { READY, AT_BLOCK, AT_WARP, DONE };
struct Copy { char *to; char value[16]; int group; };
const size_t STACK = 256 << 10, N_THREADS = 1024, MAX_COPIES = 256;
struct Thread {
    ucontext_t start;
    jmp_buf here;
    bool began;
    State state;
    int site;
    bool orders;
    uint64_t pc;
    int group, n_copies;
    Copy copies[MAX_COPIES];
};
static Thread threads[N_THREADS];
static char *stacks;
static jmp_buf scheduler;
static sigjmp_buf fatal;
static char reason[1024];
static const Launch *launched;
static uint64_t code_base;

/* where in the kernel's text; Python puts the text's line there */
static const char *at_code(uint64_t pc)
{
    static char texts[4][32];
    static int next;
    char *text = texts[next = (next + 1) & 3];
    snprintf(text, sizeof texts[0], " [@%llx]", (unsigned long long)(pc - code_base));
    return text;
}
[[noreturn]] static void fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    siglongjmp(fatal, 1);
}
}   /* namespace emulator */

#include "accesses.h"

namespace emulator {
static void wait_for(State state, int site, bool orders, uint64_t pc)
{
    Thread &t = threads[self];
    t.state = state;
    t.site = site;
    t.orders = orders;
    t.pc = pc;
    if (!_setjmp(t.here)) _longjmp(scheduler, 1);
}

static void thread_main()
{
    launched->body(launched->arguments);
    threads[self].state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(int t)
{
    self = t;
    emulator_public.thread_index = {(unsigned)t, 0, 0};
    if (_setjmp(scheduler)) return;
    if (threads[t].began) _longjmp(threads[t].here, 1);
    threads[t].began = true;
    setcontext(&threads[t].start);
}

[[noreturn]] static void diverged(int t, int o)
{
    fail("threads %d and %d of block (%u, %u, %u) wait at different barriers%s%s", t, o, block_index.x, block_index.y,
         block_index.z, at_code(threads[t].pc), at_code(threads[o].pc));
}

/* let go those that everyone they wait for has reached; says whether any was */
static bool release()
{
    const int n = launched->wg;
    int at_block = 0, alive = 0, first = -1;
    for (int t = 0; t < n; t++) {
        alive += threads[t].state != DONE;
        if (threads[t].state != AT_BLOCK) continue;
        at_block++;
        if (first < 0) first = t;
    }
    if (alive && at_block == alive) {
        for (int t = first; t < n; t++) {
            if (threads[t].state != AT_BLOCK) continue;
            if (threads[t].site != threads[first].site) diverged(first, t);
            threads[t].state = READY;
        }
        block_when++;
        memset(warp_whens, 0, sizeof warp_whens);
        return true;
    }
    bool any = false;
    for (int w = 0; w < n; w += 32) {
        bool all = true;
        for (int l = 0; l < 32; l++) all &= threads[w + l].state == AT_WARP;
        if (!all) continue;
        for (int l = 0; l < 32; l++) {
            if (threads[w + l].site != threads[w].site) diverged(w, w + l);
            threads[w + l].state = READY;
        }
        warp_whens[w/32] += threads[w].orders;
        any = true;
    }
    return any;
}

static void run_block(unsigned *seed)
{
    const int n = launched->wg;
    const Span shared = launched->shared;
    if (shared.end > shared.begin) memset((void *)shared.begin, 0xff, shared.end - shared.begin);
    block_serial++;
    block_when = 0;
    memset(warp_whens, 0, sizeof warp_whens);
    int turns[N_THREADS];
    for (int t = 0; t < n; t++) {
        turns[t] = launched->order == BACKWARD ? n - 1 - t : t;
        getcontext(&threads[t].start);
        threads[t].start.uc_stack.ss_sp = stacks + t*STACK;
        threads[t].start.uc_stack.ss_size = STACK;
        threads[t].start.uc_link = nullptr;
        makecontext(&threads[t].start, thread_main, 0);
        threads[t].began = false;
        threads[t].state = READY;
        threads[t].group = threads[t].n_copies = 0;
    }
    for (;;) {
        if (launched->order > BACKWARD)
            for (int t = n - 1; t > 0; t--) {
                *seed = *seed*1664525u + 1013904223u;
                const int o = (int)((*seed >> 8) % (unsigned)(t + 1)), was = turns[t];
                turns[t] = turns[o];
                turns[o] = was;
            }
        bool alive = false;
        for (int i = 0; i < n; i++) {
            if (threads[turns[i]].state == READY) resume(turns[i]);
            alive |= threads[turns[i]].state != DONE;
        }
        if (!alive) return;
        if (release()) continue;
        for (int t = 0; t < n; t++)
            if (threads[t].state != DONE)
                fail("thread %d of block (%u, %u, %u) waits at a %s barrier that others never reach%s", t, block_index.x,
                     block_index.y, block_index.z, threads[t].state == AT_WARP ? "warp's" : "block's", at_code(threads[t].pc));
    }
}

static void on_signal(int number, siginfo_t *info, void *context)
{
    const uint64_t pc = (uint64_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    snprintf(reason, sizeof reason, "thread %d of block (%u, %u, %u): %s at %p%s", self, block_index.x, block_index.y,
             block_index.z, number == SIGSEGV || number == SIGBUS ? "access outside of all tensors"
             : "misaligned access, index out of bounds, or shift too far", info->si_addr, at_code(pc));
    siglongjmp(fatal, 1);
}

static void run_blocks()
{
    unsigned seed = launched->order;
    const Dim g = emulator_public.grid_size;
    const uint64_t n = (uint64_t)g.x*g.y*g.z;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t b = launched->order == BACKWARD ? n - 1 - i : i;
        block_index = {(unsigned)(b % g.x), (unsigned)(b/g.x % g.y), (unsigned)(b/g.x/g.y)};
        run_block(&seed);
    }
}
}   /* namespace emulator */

extern "C" {
using namespace emulator;

#define CALLER ((uint64_t)__builtin_return_address(0) - 1)
void emulator_block_barrier(int site) { wait_for(AT_BLOCK, site, true, CALLER); }
void emulator_warp_barrier(unsigned mask, int site, bool orders)
{
    if (mask != 0xffffffffu) fail("a mask of part of a warp, %#x, is nothing that the emulator knows%s", mask, at_code(CALLER));
    wait_for(AT_WARP, site, orders, CALLER);
}

void emulator_copy_later(void *to, const void *value)
{
    Thread &t = threads[self];
    const uint64_t a = (uint64_t)to, pc = CALLER;
    if (t.n_copies == MAX_COPIES) abort();
    if (a % 16) bad_access(a, 16, true, pc, "that are not aligned");
    accessed(to, 16, true, pc);
    for (int i = 0; i < 16; i++) shared_cells[a - launched->shared.begin + i].write.thread |= FLYING;
    Copy &c = t.copies[t.n_copies++];
    c.to = (char *)to;
    c.group = t.group;
    memcpy(c.value, value, 16);
}
void emulator_copy_commit() { threads[self].group++; }
void emulator_copy_wait_but(int n)
{
    Thread &t = threads[self];
    int left = 0;
    for (int i = 0; i < t.n_copies; i++) {
        const Copy c = t.copies[i];
        if (c.group >= t.group - n) {
            t.copies[left++] = c;
            continue;
        }
        memcpy(c.to, c.value, 16);
        for (int j = 0; j < 16; j++) shared_cells[(uint64_t)c.to - launched->shared.begin + j].write = now(CALLER);
    }
    t.n_copies = left;
}

/* what was wrong, or null */
const char *emulator_launch(const Launch *launch)
{
    static char *signal_stack;
    if (!stacks) {
        stacks = (char *)mmap(nullptr, N_THREADS*STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        signal_stack = (char *)malloc(64 << 10);
    }
    Dl_info code;
    dladdr((void *)launch->body, &code);
    code_base = (uint64_t)code.dli_fbase;
    launched = launch;
    emulator_public.grid_size = {(unsigned)launch->groups[0], (unsigned)launch->groups[1], (unsigned)launch->groups[2]};
    emulator_public.block_size = {(unsigned)launch->wg, 1, 1};
    open_areas();
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
    if (!sigsetjmp(fatal, 1)) run_blocks();
    for (int i = 0; i < 5; i++) sigaction(numbers[i], &before[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return reason[0] ? reason : nullptr;
}
}
