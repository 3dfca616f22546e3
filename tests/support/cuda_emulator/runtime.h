/* What the emulator's runtime offers: to the kernels' C++ (emulator.h), and to Python, which calls `emulator_launch`.
   The runtime is compiled once, and without the instrumentation that the kernels have. */
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {
struct Dim { unsigned x, y, z; };
struct Span { uint64_t begin, end; };
enum Order { FORWARD, BACKWARD };              /* others are seeds of random orders */

/* what kernels may read beside their memory */
struct Public {
    Dim thread_index, block_index, grid_size, block_size;
    int self;
    uint64_t slots[1024][8];                   /* what a thread shows to the others of its warp */
};

/* what a launch is given */
struct Launch {
    void (*body)(void **);
    void **arguments;
    const signed char *kinds;                  /* of each argument: -1 a number, 0 memory to read, 1 memory to write too */
    int n_arguments, wg, groups[3];
    unsigned order;
    const Span *spans;                         /* of the arguments that are memory: all that may be touched by way of them */
    Span shared, constant;
};
}

extern "C" {
extern emulator::Public emulator_public;
/* waits; `site` tells one barrier of the text from others, `orders` whether memory is in order behind it */
void emulator_block_barrier(int site);
void emulator_warp_barrier(unsigned mask, int site, bool orders);
void emulator_declare(const char *name, const void *at, size_t size);
void emulator_may_be_read(const void *at, size_t size);
/* 16 bytes that arrive in shared memory at `wait_but_one`, as late as they may */
void emulator_copy_later(void *to, const void *value);
void emulator_copy_commit();
void emulator_copy_wait_but(int n);
const char *emulator_launch(const emulator::Launch *launch);
}
