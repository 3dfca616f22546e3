/* The PTX machine: warps of 32 lanes, and memory. machine.cpp runs a launch, instructions.h has what each instruction does to
   a warp; section numbers are those of the PTX ISA manual 9.0.

   A register is 32 values side by side, so that the compiler makes vector code of an instruction; a mask of each tells the
   lanes in which nothing has defined it. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

enum Space : u8 { GLOBAL, SHARED, LOCAL, CONST };
enum { N_LANES = 32, MAX_THREADS = 1024 };

/* These are as program.py writes them. */
struct Insn {
    u16 op;
    u8 space, size, n, is_signed, to_signed, to_size;      /* of memory: bytes of an element, elements; of conversions: types */
    s32 guard;                                             /* the predicate's register, negative for its complement, or 0 */
    u32 target;                                            /* of a branch */
    const u32 *operands;                                   /* numbers of registers; an address is a register and an offset */
};
struct Span {                                              /* memory that a launch may touch */
    u64 begin, end;
    s64 cells;                                             /* the cell of address 0; INT64_MIN: nothing is kept of its accesses */
    u32 space, is_writable;
};
struct Launch {
    const Insn *code;
    const u32 *at, *undefined;                             /* of registers: where in a warp's; the masks at the start */
    const u8 *sizes, *registers, *arguments;               /* of registers: bytes of a lane (1: a predicate); values at the start */
    const Span *spans;
    u64 n_cells;
    u32 n_registers, registers_nbytes, n_spans, shared_nbytes, local_nbytes, grains[4], grid[3], block[3], is_backward;
};

struct Warp {
    u8 *registers;
    u32 *undefined;
    u32 pcs[N_LANES], pc, active;                          /* active: lanes that take part in the instruction */
    u32 exists, alive, waiting, carry;
    u32 early;                                             /* lanes that run beside the kernel before, not waited for yet */
    u32 synced, unwritten;                                 /* when its last bar.warp.sync was; where it read what is undefined */
    int first;                                             /* the thread of lane 0 */
};

extern const Launch *launch;
/* ends the launch: a thread did what a card would punish, or forgive at random */
[[noreturn]] void fail(const Warp &w, int lane, const std::string &what);
void synchronise(Warp &w);
void load_param(Warp &w, const Insn &i);
void load(Warp &w, const Insn &i);
void store(Warp &w, const Insn &i);
void compare_and_swap(Warp &w, const Insn &i);
void load_matrices(Warp &w, const Insn &i, bool transposed);
void copy_later(Warp &w, const Insn &i);
void copy_commit(Warp &w);
void copy_wait(Warp &w, u32 but);

#define EACH_LANE(w) for (int l = 0; l < N_LANES; l++) if ((w).active >> l & 1)

template <typename T> static inline T *lanes(const Warp &w, u32 reg) { return (T *)(w.registers + launch->at[reg]); }
static inline void define(Warp &w, u32 reg, u32 undefined)
{ w.undefined[reg] = (w.undefined[reg] & ~w.active) | (undefined & w.active); }
/* the lanes in which a predicate is true */
static inline u32 bits(const Warp &w, u32 reg)
{
    u32 mask = 0;
    for (int i = 0; i < 4; i++) mask |= (u32)(lanes<u64>(w, reg)[i]*0x0102040810204080ull >> 56) << 8*i;
    return mask;
}
/* of an operand that must be known */
static inline void need(const Warp &w, u32 reg, const char *what)
{
    if (const u32 bad = w.undefined[reg] & w.active) fail(w, __builtin_ctz(bad), std::string(what) + " that nothing has written");
}
