/* Runs a launch a block at a time, a warp until its lanes wait for others. Lanes of a warp that are at the same place go on
   together, those that are least far first, so that they meet again.

   Each access is checked: space, bounds, alignment, and order. Two threads' accesses to a byte, of which one writes, are in
   order only if a barrier of the block stands between them or, within a warp, a bar.warp.sync: warps do not run in step, and
   shuffles and votes order no memory. Nothing orders the blocks of a launch. Because the last accesses are kept for each
   place, a race is found whatever the order in which threads happen to run. One launch at a time: Python has the lock. */
#include <algorithm>
#include <sys/mman.h>
#include <vector>
#include "instructions.h"

const Launch *launch;

namespace {
struct Fault {};
enum { UNDEFINED = 0x2000, ATOMIC = 0x4000, FLYING = 0x8000, THREAD = MAX_THREADS - 1 };
/* when: in barriers so far; who: the thread, and what is special about it */
struct Access { u32 when; u16 pc, who; };
/* what must be known of a place: who wrote it last, who read it last, and of the others that read it the one whose order with
   the next access is least sure */
struct Cell { Access write, read, other; };
struct Copy { u8 *to; Cell *cell; u32 group; u8 value[16]; };
struct Thread { std::vector<Copy> copies; u32 group; };

u32 now = 1, launch_began, block_began, block_synced;
u32 block_index[3];
std::vector<Warp> warps;
std::vector<Thread> threads;
std::vector<u8> shared, local;
Cell *cells;
size_t cells_nbytes;
std::string reason;

/* Python puts the text's line there */
std::string at(u32 pc) { return " [@" + std::to_string(pc) + "]"; }

void give_back_cells() { if (cells_nbytes) munmap(cells, cells_nbytes); cells_nbytes = 0; }
/* time only grows, so that what earlier launches left does not count */
void make_cells()
{
    if (now > 1u << 31) give_back_cells(), now = 1;
    if (launch->n_cells*sizeof(Cell) <= cells_nbytes) return;
    give_back_cells();
    cells_nbytes = std::max((size_t)launch->n_cells*sizeof(Cell), (size_t)1 << 20);
    cells = (Cell *)mmap(nullptr, cells_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) abort();
}

/* -- accesses ------------------------------------------------------------------------------------------------------------ */

struct Lanes {                                             /* what they do with memory, and where in the host's it is */
    Warp &w;
    Space space;
    u32 size;
    bool writes;
    u16 special;
    u64 a[N_LANES];
    u32 unknown[N_LANES] = {};                             /* bits of the grains read that are undefined */
    u8 *where[N_LANES];
    Cell *cell[N_LANES];

    Lanes(Warp &w, Space space, u32 size, bool writes, const u32 *operand, u16 special = 0)
        : w(w), space(space), size(size), writes(writes), special(special)
    {
        need(w, operand[0], "uses an address");
        const bool is_wide = launch->sizes[operand[0]] == 8;
        for (int l = 0; l < N_LANES; l++)
            a[l] = (is_wide ? lanes<u64>(w, operand[0])[l] : lanes<u32>(w, operand[0])[l]) + (u64)(s64)(s32)operand[1];
    }
    [[noreturn]] void bad(int l, const std::string &why, const Span *s = nullptr) const
    {
        const std::string place = s ? "{" + std::to_string(s - launch->spans) + "}, byte " + std::to_string(a[l] - s->begin) : std::to_string(a[l]);
        fail(w, l, (writes ? "writes " : "reads ") + std::to_string(size) + " bytes (" + place + ") " + why + at(w.pc));
    }
    [[noreturn]] void race(int l, const Span *s, const Access &other, bool other_writes) const
    {
        const int thread = other.who & THREAD, me = w.first + l;
        const std::string who = "thread " + std::to_string(thread);
        if (other.who & FLYING) bad(l, "to which a copy of " + who + ", not waited for, is on its way" + at(other.pc), s);
        const char *of = other.when < block_began ? "another block" : thread/N_LANES == me/N_LANES ? "its warp" : "its block";
        bad(l, "that " + who + " of " + of + (other_writes ? " writes" : " reads") + ", and nothing orders them" + at(other.pc), s);
    }
    bool holds(const Span &s, u64 x, bool to_write) const
    {
        if (s.space != space || (to_write && !s.is_writable)) return false;
        if (x >= s.begin && x + size <= s.end) return true;
        /* 16 aligned bytes may be read where one of them belongs to a tensor: no allocation ends within them */
        return space == GLOBAL && !to_write && size == 16 && x < s.end && x + 16 > s.begin;
    }
    const Span *find(u64 x, bool to_write) const
    {
        const Span *s = launch->spans, *end = s + launch->n_spans;
        while (s < end && !holds(*s, x, to_write)) s++;
        return s < end ? s : nullptr;
    }
    /* 0: it is in order with this one; else how little orders it: 1 of the same warp, 2 of another, 3 of another block */
    int unordered(const Access &x, int me, u32 since) const
    {
        if (x.when < since) return 0;
        if (x.when < block_began) return x.who & special & ATOMIC ? 0 : 3;
        if (x.who & FLYING) return 3;
        const int other = x.who & THREAD;
        if (other == me || x.who & special & ATOMIC || x.when < block_synced) return 0;
        return other/N_LANES != me/N_LANES ? 2 : x.when >= w.synced;
    }
    /* check and note them all; returns the lanes that read what is undefined. `undefined`: in which that which is written is */
    u32 touch(u32 undefined = 0)
    {
        u32 found = 0;
        const Span *s = nullptr;
        const u32 grain = launch->grains[space], since = space == GLOBAL ? launch_began : block_began;
        EACH_LANE(w) {
            if (space == GLOBAL && w.early >> l & 1) bad(l, "before it has waited for the kernel before");
            if (a[l] % size) bad(l, "that are not aligned: a misaligned access");
            if (!(s && holds(*s, a[l], writes)) && !(s = find(a[l], writes))) {
                if (const Span *other = find(a[l], false)) bad(l, "of memory that it is given to read", other);
                static const char *names[] = {"tensors", "shared arrays", "arrays of the thread", "constants"};
                bad(l, std::string("outside of all ") + names[space]);
            }
            const int me = w.first + l;
            const u64 within = space == LOCAL ? (u64)me*launch->local_nbytes + a[l] : a[l];
            where[l] = space == SHARED ? &shared[within] : space == LOCAL ? &local[within] : (u8 *)within;
            if (s->cells == INT64_MIN) continue;
            const Access mine = {now, (u16)w.pc, (u16)(me | special | (undefined >> l & 1 ? UNDEFINED : 0))};
            cell[l] = cells + (s->cells + (s64)(within/grain));
            for (u32 i = 0; i < size/grain; i++) {
                Cell &c = cell[l][i];
                if (unordered(c.write, me, since)) race(l, s, c.write, true);
                if (writes) {
                    if (unordered(c.read, me, since)) race(l, s, c.read, false);
                    if (unordered(c.other, me, since)) race(l, s, c.other, false);
                    c.write = mine;
                    continue;
                }
                unknown[l] |= (u32)(c.write.when < since || c.write.who & UNDEFINED) << i;
                if ((c.read.who & THREAD) != me || c.read.when < block_began) {
                    const int kind = unordered(c.read, me, since);
                    if (kind && kind >= unordered(c.other, me, since)) c.other = c.read;
                }
                c.read = mine;
            }
            if (space == GLOBAL) unknown[l] = 0;           /* of which the host knows what is defined */
            found |= (u32)(unknown[l] != 0) << l;
        }
        if (found) w.unwritten = w.pc;
        return found;
    }
};

/* -- threads ------------------------------------------------------------------------------------------------------------- */

void wait_for_ever(const Warp &w, int l) { fail(w, l, "waits at a barrier that others never reach" + at(w.pcs[l])); }

/* let a warp's lanes go on if all of them wait at the same place for each other */
bool meet(Warp &w)
{
    const int l = w.alive ? __builtin_ctz(w.alive) : 0;
    const Insn &i = launch->code[w.pcs[l]];
    const bool at_one = std::all_of(w.pcs, w.pcs + N_LANES, [&](const u32 &pc) { return !(w.alive >> (&pc - w.pcs) & 1) || pc == w.pcs[l]; });
    if (!w.alive || !at_one || OPS[i.op].kind < WARP) return false;
    if (OPS[i.op].kind == WARP_WHOLE && w.alive != w.exists) wait_for_ever(w, l);
    w.pc = w.pcs[l];
    w.active = w.alive;
    w.waiting = 0;
    OPS[i.op].run(w, i);
    std::fill(w.pcs, w.pcs + N_LANES, w.pc + 1);
    return true;
}

/* let the block's threads go on if all of them wait at the same barrier; return whether any is left */
bool meet()
{
    const Warp *one = nullptr;
    int lane = 0;
    for (const Warp &w : warps)
        for (int l = 0; l < N_LANES; l++) {
            if (!(w.alive >> l & 1)) continue;
            if (!one) one = &w, lane = l;
            if (w.pcs[l] != one->pcs[lane])
                fail(*one, lane, "and thread " + std::to_string(w.first + l) + " wait at different barriers" + at(one->pcs[lane]) + at(w.pcs[l]));
        }
    if (!one) return false;
    if (OPS[launch->code[one->pcs[lane]].op].kind != BLOCK) wait_for_ever(*one, lane);
    block_synced = ++now;
    for (Warp &w : warps) {
        w.waiting = 0;
        for (u32 &pc : w.pcs) pc++;
    }
    return true;
}

/* run a warp's lanes until all have ended or wait */
void run(Warp &w)
{
    while (w.alive & ~w.waiting || meet(w)) {
        u32 pc = ~0u, others = ~0u, group = 0;
        const u32 ready = w.alive & ~w.waiting;
        for (int l = 0; l < N_LANES; l++) if (ready >> l & 1) pc = std::min(pc, w.pcs[l]);
        for (int l = 0; l < N_LANES; l++) {
            if (!(ready >> l & 1)) continue;
            if (w.pcs[l] == pc) group |= 1u << l;
            else others = std::min(others, w.pcs[l]);
        }
        bool is_one = true;
        while (is_one && pc < others) {
            const Insn &i = launch->code[pc];
            const Op &op = OPS[i.op];
            w.pc = pc;
            w.active = group;
            if (i.guard) {
                const u32 reg = (u32)abs(i.guard);
                need(w, reg, "goes by a condition");
                w.active &= i.guard > 0 ? bits(w, reg) : ~bits(w, reg);
            }
            if (op.kind == PLAIN || (op.kind >= WARP && w.active == w.exists)) {
                if (w.active) op.run(w, i);
                pc++;
            } else if (op.kind == BRANCH && (w.active == group || !w.active)) {
                pc = w.active ? i.target : pc + 1;
            } else {
                is_one = false;
                for (int l = 0; l < N_LANES; l++)
                    if (group >> l & 1) w.pcs[l] = !(w.active >> l & 1) ? pc + 1 : op.kind == BRANCH ? i.target : pc;
                if (op.kind == EXIT) w.alive &= ~w.active;
                else if (op.kind != BRANCH) w.waiting |= w.active;
            }
        }
        if (is_one) for (int l = 0; l < N_LANES; l++) if (group >> l & 1) w.pcs[l] = pc;
    }
}

void set(Warp &w, u32 special, u32 value) { std::fill(lanes<u32>(w, special), lanes<u32>(w, special) + N_LANES, value); }

void run_block()
{
    block_began = block_synced = ++now;
    for (Thread &t : threads) t.copies.clear(), t.group = 0;
    for (Warp &w : warps) {
        memcpy(w.undefined, launch->undefined, 4*launch->n_registers);
        for (u32 d = 0; d < 3; d++) set(w, 6 + d, block_index[d]);
        std::fill(w.pcs, w.pcs + N_LANES, 0);
        w.alive = w.exists;
        w.waiting = 0;
        w.synced = now;
    }
    do {
        if (launch->is_backward) std::for_each(warps.rbegin(), warps.rend(), run);
        else std::for_each(warps.begin(), warps.end(), run);
    } while (meet());
}

void run_launch()
{
    const u32 *size = launch->block, *grid = launch->grid, n_threads = size[0]*size[1]*size[2];
    const size_t nbytes = launch->registers_nbytes;
    make_cells();
    warps.assign((n_threads + N_LANES - 1)/N_LANES, Warp());
    threads.resize(n_threads);
    shared.assign(launch->shared_nbytes, 0xff);
    local.assign((size_t)n_threads*launch->local_nbytes, 0xff);
    std::vector<u8> registers(warps.size()*nbytes + 64);
    std::vector<u32> undefined(warps.size()*launch->n_registers);
    for (size_t i = 0; i < warps.size(); i++) {
        Warp &w = warps[i];
        w.first = (int)i*N_LANES;
        w.exists = (u32)(((u64)1 << std::min(n_threads - (u32)w.first, (u32)N_LANES)) - 1);
        w.undefined = &undefined[i*launch->n_registers];
        w.registers = (u8 *)(((u64)registers.data() + 63) & ~(u64)63) + i*nbytes;
        memcpy(w.registers, launch->registers, nbytes);
        for (u32 l = 0; l < N_LANES; l++) {
            const u32 t = (u32)w.first + l, index[] = {t % size[0], t/size[0] % size[1], t/size[0]/size[1]};
            for (u32 d = 0; d < 3; d++) lanes<u32>(w, d)[l] = index[d];
            lanes<u32>(w, 12)[l] = l;
        }
        for (u32 d = 0; d < 3; d++) set(w, 3 + d, size[d]), set(w, 9 + d, grid[d]);
        set(w, 13, (u32)i);
    }
    launch_began = ++now;
    const u64 n = (u64)grid[0]*grid[1]*grid[2];
    for (u64 i = 0; i < n; i++) {
        const u64 b = launch->is_backward ? n - 1 - i : i, index[] = {b % grid[0], b/grid[0] % grid[1], b/grid[0]/grid[1]};
        std::copy(index, index + 3, block_index);
        run_block();
    }
}
}   /* namespace */

/* -- what instructions ask for ------------------------------------------------------------------------------------------- */

void fail(const Warp &w, int lane, const std::string &what)
{
    reason = "thread " + std::to_string(w.first + lane) + " of block (";
    for (u32 d = 0; d < 3; d++) reason += std::to_string(block_index[d]) + (d < 2 ? ", " : ") ");
    reason += what + (what.back() == ']' ? "" : at(w.pc));
    throw Fault();
}

void synchronise(Warp &w) { w.synced = ++now; }

void load_param(Warp &w, const Insn &i)
{
    for (int l = 0; l < N_LANES; l++)
        memcpy(lanes<u8>(w, i.operands[0]) + l*launch->sizes[i.operands[0]], launch->arguments + i.operands[2], i.size);
    define(w, i.operands[0], 0);
}

void load(Warp &w, const Insn &i)
{
    Lanes from(w, (Space)i.space, (u32)i.size*i.n, false, i.operands + i.n);
    from.touch();
    const u32 grains = i.size/launch->grains[i.space];
    for (int e = 0; e < i.n; e++) {
        const u32 to = i.operands[e], to_size = launch->sizes[to];
        u32 undefined = 0;
        EACH_LANE(w) undefined |= (u32)((from.unknown[l] >> e*grains & ((1u << grains) - 1)) != 0) << l;
        EACH_LANE(w) {
            u64 value = 0;
            memcpy(&value, from.where[l] + e*i.size, i.size);
            if (i.is_signed) value = (u64)widened(value, i.size, true);
            memcpy(lanes<u8>(w, to) + (u32)l*to_size, &value, to_size);
        }
        define(w, to, undefined);
    }
}

void store(Warp &w, const Insn &i)
{
    Lanes to(w, (Space)i.space, (u32)i.size*i.n, true, i.operands);
    u32 undefined = 0;
    for (int e = 0; e < i.n; e++) undefined |= w.undefined[i.operands[2 + e]] & w.active;
    if (undefined && i.space == GLOBAL)
        fail(w, __builtin_ctz(undefined), "writes what comes from memory that nothing has written" + at(w.pc) + at(w.unwritten));
    to.touch(undefined);
    for (int e = 0; e < i.n; e++) {
        const u32 from = i.operands[2 + e], from_size = launch->sizes[from];
        EACH_LANE(w) memcpy(to.where[l] + e*i.size, lanes<u8>(w, from) + (u32)l*from_size, i.size);
    }
}

/* 9.7.13.4: lanes take their turns */
void compare_and_swap(Warp &w, const Insn &i)
{
    const u32 *o = i.operands;
    Lanes at(w, GLOBAL, 4, true, o + 1, ATOMIC);
    need(w, o[3], "compares a value");
    need(w, o[4], "writes a value");
    at.touch();
    u32 before[N_LANES];
    EACH_LANE(w) {
        u32 *p = (u32 *)at.where[l];
        before[l] = *p;
        if (*p == lanes<u32>(w, o[3])[l]) *p = lanes<u32>(w, o[4])[l];
    }
    put<u32>(w, o[0], [&](int l) { return before[l]; });
    define(w, o[0], 0);
}

/* 9.7.14.5.15: lane 8i+j says where row j of matrix i is; a lane gets two neighbours of row lane/4, or of that column */
void load_matrices(Warp &w, const Insn &i, bool transposed)
{
    Lanes rows(w, SHARED, 16, false, i.operands + 4);
    EACH_LANE(w) if (rows.a[l] % 16) rows.bad(l, "that are not aligned: a misaligned access");
    for (int m = 0; m < 4; m++) {
        u32 value[N_LANES] = {}, undefined = 0;
        for (int half = 0; half < 2; half++) {
            Lanes from(w, SHARED, 2, false, i.operands + 4);
            for (int l = 0; l < N_LANES; l++) {
                const int across = 2*(l & 3) + half, along = l >> 2;
                from.a[l] = rows.a[8*m + (transposed ? across : along)] + 2u*(u32)(transposed ? along : across);
            }
            undefined |= from.touch();
            for (int l = 0; l < N_LANES; l++) memcpy((u16 *)&value[l] + half, from.where[l], 2);
        }
        put<u32>(w, i.operands[m], [&](int l) { return value[l]; });
        define(w, i.operands[m], undefined);
    }
}

/* 9.7.9.25.3: read at once, and written at the wait, as late as it may */
void copy_later(Warp &w, const Insn &i)
{
    const u32 all = w.active, *given = lanes<u32>(w, i.operands[5]);
    Lanes to(w, SHARED, 16, true, i.operands, FLYING), from(w, GLOBAL, 16, false, i.operands + 2);
    to.touch();
    EACH_LANE(w) {
        if (given[l] && given[l] != 16) fail(w, l, "copies part of 16 bytes, which this machine does not know");
        if (!given[l]) w.active &= ~(1u << l);
    }
    from.touch();
    const u32 reading = w.active;
    w.active = all;
    EACH_LANE(w) {
        Thread &t = threads[(size_t)(w.first + l)];
        t.copies.push_back({to.where[l], to.cell[l], t.group, {}});
        if (reading >> l & 1) memcpy(t.copies.back().value, from.where[l], 16);
    }
}
void copy_commit(Warp &w) { EACH_LANE(w) threads[(size_t)(w.first + l)].group++; }
/* until all groups of each lane but so many are there */
void copy_wait(Warp &w, u32 but)
{
    EACH_LANE(w) {
        Thread &t = threads[(size_t)(w.first + l)];
        auto arrives = [&](const Copy &c) {
            if (c.group + but >= t.group) return false;
            memcpy(c.to, c.value, 16);
            for (u32 i = 0; i < 16/launch->grains[SHARED]; i++) c.cell[i].write = {now, (u16)w.pc, (u16)(w.first + l)};
            return true;
        };
        t.copies.erase(std::remove_if(t.copies.begin(), t.copies.end(), arrives), t.copies.end());
    }
}

extern "C" {
int ptx_n_ops() { return sizeof OPS/sizeof *OPS; }
const char *ptx_op_name(int i) { return OPS[i].name; }
const char *ptx_op_operands(int i) { return OPS[i].operands; }
/* returns what was wrong, or null; it stands until the next launch */
const char *ptx_launch(const Launch *asked)
{
    launch = asked;
    const char *why = nullptr;
    try { run_launch(); } catch (const Fault &) { why = reason.c_str(); }
    if (cells_nbytes > (size_t)64 << 20) give_back_cells();
    return why;
}
}
