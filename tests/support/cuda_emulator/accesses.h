/* Every access of a kernel, checked: bounds, rights, and order.

   The compiler calls `__tsan_readN` and `__tsan_writeN` before each access (-fsanitize=thread); here they are ours. Two
   threads' accesses to a byte, of which one writes, are in order only if a barrier of the block stands between them or,
   within a warp, a __syncwarp: threads of a warp do not run in step, and shuffles and votes order no memory. Nothing
   orders the blocks of a launch. Because the last accesses of a kind are kept for each byte, a race is found whatever
   the order in which threads happen to run. */
namespace emulator {

struct Access {
    uint32_t block, when, where;               /* block: counted over all launches; when: barriers of the block so far */
    uint16_t warp_when, thread;                /* warp_when: of the warp, since the last one of the block */
};
/* What must be known of a byte: who wrote it last, and of those that read it the last one, the last one beside it in
   its warp, the last one of another warp of its block, and one of a block before. */
struct Cell {
    Access write, read, beside, other_warp, other_block;
    uint32_t may_be_read;                      /* by this block, though nothing wrote it */
};
const uint16_t FLYING = 0x8000;                /* with `thread`: a copy on its way */
const size_t CELLS = (size_t)1 << 38, KEPT_CELLS = (size_t)1 << 28, MAX_VARIABLES = 32, MAX_AREAS = 64;

struct Variable { const char *name; uint64_t begin, end; };
struct Area { uint64_t begin, end; bool written; Cell *cells; };

static Variable variables[MAX_VARIABLES];
static Area areas[MAX_AREAS];                  /* spans that overlap are one */
static Span readable[MAX_AREAS], writable[MAX_AREAS];
static size_t n_variables, n_areas, n_readable, n_writable;
static Cell *all_cells, *shared_cells;
static uint32_t block_serial = 1, launch_first, block_when, warp_whens[32];

static Access now(uint64_t pc)
{
    return {block_serial, block_when, (uint32_t)(pc - code_base), (uint16_t)warp_whens[self/32], (uint16_t)self};
}

static void describe(char *to, size_t size, uint64_t a)
{
    for (size_t i = 0; i < n_variables; i++)
        if (a - variables[i].begin < variables[i].end - variables[i].begin) {
            snprintf(to, size, "%s, byte %llu", variables[i].name, (unsigned long long)(a - variables[i].begin));
            return;
        }
    for (int i = 0, memory = 0; i < launched->n_arguments; i++) {
        if (launched->kinds[i] < 0) continue;
        const Span s = launched->spans[memory++];
        if (a - s.begin < s.end - s.begin) {
            snprintf(to, size, "the memory of tensor %d, byte %llu", memory - 1, (unsigned long long)(a - s.begin));
            return;
        }
    }
    snprintf(to, size, "address %p", (void *)a);
}

[[noreturn]] static void bad_access(uint64_t a, size_t size, bool writes, uint64_t pc, const char *why)
{
    char place[96];
    describe(place, sizeof place, a);
    fail("thread %d of block (%u, %u, %u) %s %zu bytes (%s) %s%s", self, block_index.x, block_index.y,
         block_index.z, writes ? "writes" : "reads", size, place, why, at_code(pc));
}

[[noreturn]] static void race(const Access &other, bool other_writes, uint64_t a, size_t size, bool writes, uint64_t pc)
{
    char why[256];
    const int thread = other.thread & ~FLYING;
    if (other.thread & FLYING)
        snprintf(why, sizeof why, "to which a copy of thread %d, not waited for, is on its way%s", thread, at_code(code_base + other.where));
    else
        snprintf(why, sizeof why, "that thread %d of %s %s, and nothing orders them (barrier interval %u)%s", thread,
                 other.block != block_serial ? "another block" : thread/32 == self/32 ? "its warp" : "its block",
                 other_writes ? "writes" : "reads", block_when, at_code(code_base + other.where));
    bad_access(a, size, writes, pc, why);
}

/* whether nothing orders an access before this thread's; of blocks before `oldest` nothing counts */
static inline bool unordered(const Access &a, uint32_t oldest)
{
    if (a.block < oldest) return false;
    if (a.block != block_serial || a.thread & FLYING) return true;
    if (a.thread == self || a.when != block_when) return false;
    return a.thread/32 != self/32 || a.warp_when == warp_whens[self/32];
}

static inline void note_read(Cell &c, const Access &me, uint32_t oldest)
{
    if (c.read.block >= oldest && c.read.thread != me.thread) {
        if (c.read.block != me.block) c.other_block = c.read;
        else if (c.read.thread/32 == me.thread/32) c.beside = c.read;
        else c.other_warp = c.read;
    }
    c.read = me;
}

static inline void check_cells(Cell *cells, uint64_t a, size_t size, bool writes, uint64_t pc, bool is_shared)
{
    const uint32_t oldest = is_shared ? block_serial : launch_first;
    const Access me = now(pc);
    for (size_t i = 0; i < size; i++) {
        Cell &c = cells[i];
        if (unordered(c.write, oldest)) race(c.write, true, a + i, size, writes, pc);
        if (!writes) {
            if (is_shared && c.write.block != block_serial && c.may_be_read != block_serial) bad_access(a + i, size, false, pc, "that nothing has written");
            note_read(c, me, oldest);
            continue;
        }
        const Access *readers[] = {&c.read, &c.beside, &c.other_warp, &c.other_block};
        for (const Access *r : readers) if (unordered(*r, oldest)) race(*r, false, a + i, size, true, pc);
        c.write = me;
    }
}

static inline bool is_in(const Span *spans, size_t n, uint64_t a, size_t size)
{
    for (size_t i = 0; i < n; i++) if (a >= spans[i].begin && a + size <= spans[i].end) return true;
    return false;
}
/* 16 aligned bytes may be read where one of them belongs to a tensor: no allocation ends within them */
static bool is_whole_vector(uint64_t a, size_t size)
{
    if (size != 16 || a % 16) return false;
    for (size_t i = 0; i < n_readable; i++) if (a < readable[i].end && a + 16 > readable[i].begin) return true;
    return false;
}

static void accessed(const void *p, size_t size, bool writes, uint64_t pc)
{
    const uint64_t a = (uint64_t)p;
    if (a - (uint64_t)stacks < N_THREADS*STACK || a - (uint64_t)&emulator_public < sizeof emulator_public) return;
    const Span &shared = launched->shared;
    if (a - shared.begin < shared.end - shared.begin) {
        for (size_t i = 0; i < n_variables; i++)
            if (a >= variables[i].begin && a + size <= variables[i].end)
                return check_cells(shared_cells + (a - shared.begin), a, size, writes, pc, true);
        bad_access(a, size, writes, pc, "outside of all shared arrays");
    }
    if (!writes && is_in(&launched->constant, 1, a, size)) return;
    if (writes ? !is_in(writable, n_writable, a, size) : !is_in(readable, n_readable, a, size) && !is_whole_vector(a, size))
        bad_access(a, size, writes, pc, writes && is_in(readable, n_readable, a, size)
                   ? "of memory that it is given to read" : "outside of all tensors");
    for (size_t i = 0; i < n_areas; i++)
        if (areas[i].written && a - areas[i].begin < areas[i].end - areas[i].begin)
            return check_cells(areas[i].cells + (a - areas[i].begin), a, size, writes, pc, false);
}

/* prepare for a launch's memory */
static void open_areas()
{
    if (!all_cells) {
        all_cells = (Cell *)mmap(nullptr, CELLS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all_cells == MAP_FAILED) abort();
    }
    n_variables = n_areas = n_readable = n_writable = 0;
    launch_first = block_serial + 1;
    for (int i = 0, memory = 0; i < launched->n_arguments; i++) {
        if (launched->kinds[i] < 0) continue;
        const Span s = launched->spans[memory++];
        if (n_readable == MAX_AREAS) abort();
        readable[n_readable++] = s;
        if (launched->kinds[i] > 0) writable[n_writable++] = s;
        areas[n_areas++] = {s.begin, (s.end + 15)/16*16, launched->kinds[i] > 0, nullptr};
    }
    for (size_t i = 0; i < n_areas; i++)       /* until none overlaps another */
        for (size_t j = i + 1; j < n_areas; j++)
            if (areas[i].begin < areas[j].end && areas[j].begin < areas[i].end) {
                areas[i] = {areas[i].begin < areas[j].begin ? areas[i].begin : areas[j].begin,
                            areas[i].end > areas[j].end ? areas[i].end : areas[j].end,
                            areas[i].written || areas[j].written, nullptr};
                areas[j] = areas[--n_areas];
                j = i;                         /* it may overlap those before */
            }
    shared_cells = all_cells;
    Cell *next = all_cells + (launched->shared.end - launched->shared.begin);
    for (size_t i = 0; i < n_areas; i++) {
        areas[i].cells = next;
        next += areas[i].written ? areas[i].end - areas[i].begin : 0;
    }
    if (next > all_cells + CELLS/sizeof(Cell)) abort();
    static Cell *last_end;
    if (last_end > all_cells + KEPT_CELLS/sizeof(Cell)) madvise(all_cells, (char *)last_end - (char *)all_cells, MADV_DONTNEED);
    last_end = next;
}
}   /* namespace emulator */

extern "C" {
void emulator_declare(const char *name, const void *at, size_t size)
{
    using namespace emulator;
    for (size_t i = 0; i < n_variables; i++) if (variables[i].begin == (uint64_t)at) return;
    if (n_variables == MAX_VARIABLES) abort();
    variables[n_variables++] = {name, (uint64_t)at, (uint64_t)at + size};
}

void emulator_may_be_read(const void *at, size_t size)
{
    using namespace emulator;
    for (size_t i = 0; i < size; i++) shared_cells[(uint64_t)at - launched->shared.begin + i].may_be_read = block_serial;
}

#define PC ((uint64_t)__builtin_return_address(0) - 1)
#define HOOKS(n) \
    void __tsan_read##n(void *p) { emulator::accessed(p, n, false, PC); } \
    void __tsan_write##n(void *p) { emulator::accessed(p, n, true, PC); } \
    void __tsan_unaligned_read##n(void *p) { emulator::accessed(p, n, false, PC); } \
    void __tsan_unaligned_write##n(void *p) { emulator::accessed(p, n, true, PC); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void *p, size_t n) { emulator::accessed(p, n, false, PC); }
void __tsan_write_range(void *p, size_t n) { emulator::accessed(p, n, true, PC); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
}
