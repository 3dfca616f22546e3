/* What instructions do: a table of names, operands and functions, which program.py reads too. */
#pragma once
#include <fenv.h>
#include <math.h>
#include <string.h>
#include <tuple>
#include <utility>
#include <type_traits>
#include "machine.h"

/* lanes wait for their block; for those of their warp that have not ended; for their whole warp */
enum Kind : u8 { PLAIN, BRANCH, EXIT, BLOCK, WARP, WARP_WHOLE };
struct Op {
    const char *name, *operands;                           /* of each its size: p a predicate, 2, 4, 8 bytes; m an address */
    void (*run)(Warp &w, const Insn &i);
    Kind kind;
};

template <typename T> constexpr char letter() { return std::is_same<T, bool>::value ? 'p' : '0' + sizeof(T); }
template <typename... T> struct Letters { static constexpr char text[] = {letter<T>()..., 0}; };

template <typename D, typename F> static inline void put(Warp &w, u32 reg, F f)
{
    D *d = lanes<D>(w, reg);
    if (w.active == ~0u) {
        #pragma GCC ivdep
        for (int l = 0; l < N_LANES; l++) d[l] = f(l);
    } else {
        #pragma GCC ivdep
        for (int l = 0; l < N_LANES; l++) d[l] = w.active >> l & 1 ? f(l) : d[l];
    }
}
/* d = f(a, b, ...) in each lane; it is undefined where any of them is */
template <typename D, typename... S, typename F, size_t... K>
static inline void each_of(Warp &w, const Insn &i, F f, std::index_sequence<K...>)
{
    const u32 *o = i.operands;
    const std::tuple<const S *...> from(lanes<S>(w, o[K + 1])...);
    put<D>(w, o[0], [=](int l) { return f(std::get<K>(from)[l]...); });
    define(w, o[0], (w.undefined[o[K + 1]] | ...));
}
template <typename D, typename... S, typename F> static inline void each(Warp &w, const Insn &i, F f)
{ each_of<D, S...>(w, i, f, std::index_sequence_for<S...>()); }
template <typename T> static void select(Warp &w, const Insn &i)
{
    const u32 *o = i.operands, *u = w.undefined, which = bits(w, o[3]);
    const u32 undefined = u[o[3]] | (u[o[1]] & which) | (u[o[2]] & ~which);
    each<T, T, T, bool>(w, i, [](T a, T b, bool c) -> T { return c ? a : b; });
    define(w, o[0], undefined);
}

/* -- numbers ------------------------------------------------------------------------------------------------------ */

static inline u32 word(f32 x) { u32 u; memcpy(&u, &x, 4); return u; }
static inline f32 real(u32 u) { f32 x; memcpy(&x, &u, 4); return x; }
/* .ftz: a subnormal number is a zero of its sign */
static inline f32 z(f32 x) { const u32 u = word(x); return real(u & 0x7f800000u ? u : u & 0x80000000u); }
static inline f32 saturated(f32 x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }          /* NaN: 0 */
template <typename T> static inline T most(T a, T b) { return a > b ? a : b; }
template <typename T> static inline T least(T a, T b) { return a < b ? a : b; }
/* 9.7.3: the other one where one is NaN; +0 is more than -0 */
template <> inline f32 most(f32 a, f32 b)
{ return a != a ? (b != b ? real(0x7fffffff) : b) : b != b ? a : a == b ? real(word(a) & word(b)) : a > b ? a : b; }
template <> inline f32 least(f32 a, f32 b)
{ return a != a ? (b != b ? real(0x7fffffff) : b) : b != b ? a : a == b ? real(word(a) | word(b)) : a < b ? a : b; }
/* 9.7.1: unspecified where b is 0; that must not end the process */
template <typename T> static inline T quotient(T a, T b)
{ return b == 0 ? (T)-1 : std::is_signed<T>::value && b == (T)-1 ? (T)(0 - a) : (T)(a/b); }
template <typename T> static inline T remainder_of(T a, T b) { return b == 0 ? a : (T)(a - quotient(a, b)*b); }
template <typename T> static inline T shifted_left(T a, u32 n) { return n < 8*sizeof(T) ? (T)(a << n) : (T)0; }
template <typename T> static inline T shifted_right(T a, u32 n)
{ return (T)(a >> (n < 8*sizeof(T) ? n : 8*sizeof(T) - 1) >> (n >= 8*sizeof(T))); }
template <typename T> static inline T field_inserted(T a, T b, u32 position, u32 length)
{
    position &= 255, length &= 255;
    const T ones = length >= 8*sizeof(T) ? ~(T)0 : ((T)1 << length) - 1;
    const T mask = position >= 8*sizeof(T) ? 0 : ones << position;
    return (b & ~mask) | ((position >= 8*sizeof(T) ? 0 : a << position) & mask);
}
/* 9.7.1.22: above its highest bit the field's sign, that of a's last bit where it ends beyond it */
template <typename T> static inline T field(T a, u32 position, u32 length)
{
    position &= 255, length &= 255;
    const u32 last = least(position + length - 1, (u32)31);
    const u32 sign = std::is_signed<T>::value && length ? (u32)a >> last & 1 : 0;
    u32 x = 0;
    for (u32 i = 0; i < 32; i++) x |= (i < length && position + i < 32 ? (u32)a >> (position + i) & 1 : sign) << i;
    return (T)x;
}
static inline f32 from_half(u16 h)
{
    const u32 sign = (u32)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    const f32 normal = real(sign | (e + (e == 31 ? 224 : 112)) << 23 | m << 13);
    return e ? normal : real(sign | word((f32)(s32)m*5.9604644775390625e-8f));
}
static inline u16 to_half(f32 f)                           /* to nearest, ties to even */
{
    const u32 u = word(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    const u32 small = (u32)(s32)rintf(real(least(a, 0x38800000u))*16777216.0f);
    const u32 normal = (a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13;
    return (u16)(sign | (a > 0x7f800000u ? 0x7fffu : a >= 0x477ff000u ? 0x7c00u : a < 0x38800000u ? small : normal));
}
static inline u16 to_bf16(f32 f)                           /* to nearest, ties to even; NaN is the canonical one */
{ const u32 u = word(f); return f != f ? 0x7fffu : (u16)((u + 0x7fffu + (u >> 16 & 1u)) >> 16); }
/* 9.7.9.22: to the nearest that there is; NaN is 0 */
template <typename I, typename F> static inline I to_integer(F x)
{
    const F limit = (F)((u64)1 << (8*sizeof(I) - 1 - std::is_signed<I>::value))*2;
    if (x != x) return 0;
    if (x >= limit) return (I)(std::is_signed<I>::value ? ((u64)1 << (8*sizeof(I) - 1)) - 1 : ~(u64)0);
    const F bottom = std::is_signed<I>::value ? -limit : (F)0;
    return x <= bottom ? (I)bottom : (I)x;
}
/* 9.7.9.7: four bytes of eight, by a number of four bits each, of which the highest repeats the byte's sign */
static inline u32 permuted(u32 a, u32 b, u32 selectors)
{
    const u64 both = (u64)b << 32 | a;
    u32 r = 0;
    for (int j = 0; j < 4; j++) {
        const u32 s = selectors >> 4*j, byte = (u32)(both >> 8*(s & 7)) & 255;
        r |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8*j;
    }
    return r;
}
static inline u32 chosen(const u16 (&modes)[4], u32 c) { return modes[c & 3]; }
static const u16 F4E[] = {0x3210, 0x4321, 0x5432, 0x6543}, B4E[] = {0x5670, 0x6701, 0x7012, 0x0123},
    RC8[] = {0x0000, 0x1111, 0x2222, 0x3333}, ECL[] = {0x3210, 0x3211, 0x3222, 0x3333},
    ECR[] = {0x0000, 0x1110, 0x2210, 0x3210}, RC16[] = {0x1010, 0x3232, 0x1010, 0x3232};
template <typename A, typename B> static inline s32 dot4(u32 a, u32 b, s32 c)
{
    for (int j = 0; j < 4; j++) c += (s32)(A)(a >> 8*j)*(s32)(B)(b >> 8*j);
    return c;
}
/* a*(1/b), and 1/b is lost beyond 2^126 (9.7.3.8) */
static inline f32 divided_approximately(f32 a, f32 b)
{
    const u32 size = word(b) & 0x7fffffffu;
    const bool is_lost = size > 0x7e800000u && size < 0x7f800000u;
    return is_lost ? a*real(word(b) & 0x80000000u) : a/b;
}

/* -- conversions between integers (9.7.9.22): the register may be wider than the type --------------------------------- */

template <typename R> static inline s64 widened(R raw, int size, bool is_signed)
{
    const int n = 64 - 8*size;
    return is_signed ? (s64)((u64)raw << n) >> n : (s64)((u64)raw << n >> n);
}
static void convert_integer(Warp &w, const Insn &i)
{
    const u32 to = i.operands[0], from = i.operands[1];
    s64 wide[N_LANES];
    const int size = i.size, to_size = i.to_size;
    const bool is_signed = i.is_signed, to_signed = i.to_signed;
    #define FROM(R) for (int l = 0; l < N_LANES; l++) \
        wide[l] = widened((u64)widened((u64)lanes<R>(w, from)[l], size, is_signed), to_size, to_signed);
    switch (launch->sizes[from]) { case 2: FROM(u16) break; case 4: FROM(u32) break; default: FROM(u64) }
    #undef FROM
    switch (launch->sizes[to]) {
        case 2: put<u16>(w, to, [&](int l) { return (u16)wide[l]; }); break;
        case 4: put<u32>(w, to, [&](int l) { return (u32)wide[l]; }); break;
        default: put<u64>(w, to, [&](int l) { return (u64)wide[l]; });
    }
    define(w, to, w.undefined[from]);
}

/* -- parts of registers (9.7.9.3): mov between one register and two ------------------------------------------------------ */

template <typename W, typename P> static void pack(Warp &w, const Insn &i)
{ each<W, P, P>(w, i, [](P a, P b) -> W { return (W)b << 8*sizeof(P) | a; }); }
template <typename W, typename P> static void unpack(Warp &w, const Insn &i)
{
    const u32 *o = i.operands, undefined = w.undefined[o[2]];
    const W *a = lanes<W>(w, o[2]);
    put<P>(w, o[0], [=](int l) { return (P)a[l]; });
    put<P>(w, o[1], [=](int l) { return (P)(a[l] >> 8*sizeof(P)); });
    define(w, o[0], undefined);
    define(w, o[1], undefined);
}

/* 9.7.2: with the carry of the last such instruction */
static void multiply_add_low(Warp &w, const Insn &i)
{
    const u32 *o = i.operands, *a = lanes<u32>(w, o[1]), *b = lanes<u32>(w, o[2]), *c = lanes<u32>(w, o[3]);
    EACH_LANE(w) w.carry = (w.carry & ~(1u << l)) | (u32)((a[l]*b[l] + (u64)c[l]) >> 32) << l;
    each<u32, u32, u32, u32>(w, i, [](u32 a, u32 b, u32 c) { return a*b + c; });
}
static void multiply_add_high(Warp &w, const Insn &i)
{
    const u32 *o = i.operands, *a = lanes<u32>(w, o[1]), *b = lanes<u32>(w, o[2]), *c = lanes<u32>(w, o[3]), carry = w.carry;
    put<u32>(w, o[0], [=](int l) { return (u32)((u64)a[l]*b[l] >> 32) + c[l] + (carry >> l & 1); });
    define(w, o[0], w.undefined[o[1]] | w.undefined[o[2]] | w.undefined[o[3]]);
}

/* -- lanes that meet ---------------------------------------------------------------------------------------------------- */

/* masks of part of a warp are nothing that the kernels use */
static void whole_mask(const Warp &w, u32 reg)
{
    EACH_LANE(w) if (w.alive & ~lanes<u32>(w, reg)[l]) fail(w, l, "names part of its warp, which this machine does not know");
}
enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };
/* 9.7.9.6: from a lane of the same segment; else, or if none is there, its own value, and p is false */
template <Shuffle MODE> static void shuffle(Warp &w, const Insn &i)
{
    const u32 *o = i.operands, *a = lanes<u32>(w, o[2]), *b = lanes<u32>(w, o[3]), *c = lanes<u32>(w, o[4]);
    const u32 unknown = w.undefined[o[2]] | ~w.alive;
    whole_mask(w, o[5]);
    u32 value[N_LANES], undefined = w.undefined[o[3]] | w.undefined[o[4]];
    bool inside[N_LANES];
    for (int l = 0; l < N_LANES; l++) {
        const int step = b[l] & 31, segment = c[l] >> 8 & 31, clamp = c[l] & 31;
        const int last = (l & segment) | (clamp & ~segment), first = l & segment;
        int j = MODE == UP ? l - step : MODE == DOWN ? l + step : MODE == BUTTERFLY ? l ^ step : first | (step & ~segment);
        inside[l] = MODE == UP ? j >= last : j <= last;
        if (!inside[l]) j = l;
        value[l] = a[j & 31];
        undefined |= (unknown >> (j & 31) & 1) << l;
    }
    put<u32>(w, o[0], [&](int l) { return value[l]; });
    put<bool>(w, o[1], [&](int l) { return inside[l]; });
    define(w, o[0], undefined);
    define(w, o[1], w.undefined[o[3]] | w.undefined[o[4]]);
}
static void vote_any(Warp &w, const Insn &i)               /* 9.7.13.8 */
{
    const u32 *o = i.operands, found = bits(w, o[1]) & w.active, unknown = w.undefined[o[1]] & w.active;
    whole_mask(w, o[2]);
    put<bool>(w, o[0], [&](int) { return found != 0; });
    define(w, o[0], unknown ? ~0u : 0);
}
/* 9.7.14.5: d, 16x8, is a, 16xK, times b, Kx8, plus c. A register of a or b has elements of neighbouring k: figures "fragment
   layout" of .m16n8k8 and .m16n8k16 of halves and .bf16, .m16n8k8 of .tf32, .m16n8k16 and .m16n8k32 of bytes */
struct Half { enum { N = 2 }; typedef f32 Sum; static f32 at(u32 word, int e) { return from_half((u16)(word >> 16*e)); } };
struct Bfloat { enum { N = 2 }; typedef f32 Sum; static f32 at(u32 word, int e) { return real(word >> 16*e << 16); } };
struct Tf32 { enum { N = 1 }; typedef f32 Sum; static f32 at(u32 word, int) { return real(word & 0xffffe000u); } };
template <typename T> struct Byte { enum { N = 4 }; typedef s32 Sum; static s32 at(u32 word, int e) { return (T)(word >> 8*e); } };
template <int K, typename A, typename B> static void multiply_matrices(Warp &w, const Insn &i)
{
    typedef typename A::Sum Sum;
    enum { N = A::N, PARTS = K/(4*N) };
    const u32 *d = i.operands, *a = d + 4, *b = a + 2*PARTS, *c = b + PARTS;
    Sum left[16][K], right[K][8], sum[4][N_LANES];
    bool left_unknown[16] = {}, right_unknown[8] = {};
    for (int l = 0; l < N_LANES; l++) {
        const int group = l >> 2, first = N*(l & 3);
        for (int j = 0; j < 2*PARTS; j++) {
            const int row = group + 8*(j & 1), k = first + 4*N*(j >> 1);
            for (int e = 0; e < N; e++) left[row][k + e] = A::at(lanes<u32>(w, a[j])[l], e);
            left_unknown[row] |= w.undefined[a[j]] >> l & 1;
        }
        for (int j = 0; j < PARTS; j++) {
            for (int e = 0; e < N; e++) right[first + 4*N*j + e][group] = B::at(lanes<u32>(w, b[j])[l], e);
            right_unknown[group] |= w.undefined[b[j]] >> l & 1;
        }
    }
    u32 undefined[4];
    for (int e = 0; e < 4; e++) {
        undefined[e] = w.undefined[c[e]];
        for (int l = 0; l < N_LANES; l++) {
            const int row = (l >> 2) + 8*(e >> 1), column = 2*(l & 3) + (e & 1);
            Sum x = lanes<Sum>(w, c[e])[l];
            for (int k = 0; k < K; k++) x += left[row][k]*right[k][column];
            sum[e][l] = x;
            undefined[e] |= (u32)(left_unknown[row] | right_unknown[column]) << l;
        }
    }
    for (int e = 0; e < 4; e++) {
        put<Sum>(w, d[e], [&](int l) { return sum[e][l]; });
        define(w, d[e], undefined[e]);
    }
}

/* -- the table ------------------------------------------------------------------------------------------------------------ */

/* a computation in a rounding mode; the host's is to nearest */
struct Rounding {
    Rounding(int mode) { fesetround(mode); }
    ~Rounding() { fesetround(FE_TONEAREST); }
};
#define RZ Rounding towards_zero(FE_TOWARDZERO);
#define RM Rounding down(FE_DOWNWARD);
#define RP Rounding up(FE_UPWARD);

#define OP(name, letters, kind, ...) {name, letters, [](Warp &w, const Insn &i) { (void)w, (void)i; __VA_ARGS__; }, kind},
#define OP1(name, D, A, x) OP(name, (Letters<D, A>::text), PLAIN, (each<D, A>(w, i, [](A a) -> D { return x; })))
#define OP2R(name, D, A, B, round, x) \
    OP(name, (Letters<D, A, B>::text), PLAIN, round (each<D, A, B>(w, i, [](A a, B b) -> D { return x; })))
#define OP3R(name, D, A, B, C, round, x) \
    OP(name, (Letters<D, A, B, C>::text), PLAIN, round (each<D, A, B, C>(w, i, [](A a, B b, C c) -> D { return x; })))
#define OP4(name, D, A, B, C, E, x) \
    OP(name, (Letters<D, A, B, C, E>::text), PLAIN, (each<D, A, B, C, E>(w, i, [](A a, B b, C c, E e) -> D { return x; })))
#define OP2(name, D, A, B, x) OP2R(name, D, A, B, , x)
#define OP3(name, D, A, B, C, x) OP3R(name, D, A, B, C, , x)
#define REAL1(name, x) OP1(name ".f32", f32, f32, x) OP1(name ".ftz.f32", f32, f32, z((a = z(a), x)))
#define REAL2R(name, round, x) \
    OP2R(name ".f32", f32, f32, f32, round, x) OP2R(name ".ftz.f32", f32, f32, f32, round, z((a = z(a), b = z(b), x)))
#define REAL2(name, x) REAL2R(name, , x)
#define ROUNDED2(name, x) \
    REAL2R(name, , x) REAL2R(name ".rn", , x) REAL2R(name ".rz", RZ, x) REAL2R(name ".rm", RM, x) REAL2R(name ".rp", RP, x) \
    OP2(name ".f64", f64, f64, f64, x) OP2(name ".rn.f64", f64, f64, f64, x)
#define FUSED(rounding, round) \
    OP3R("fma" rounding ".f32", f32, f32, f32, f32, round, fmaf(a, b, c)) \
    OP3R("fma" rounding ".ftz.f32", f32, f32, f32, f32, round, z(fmaf(z(a), z(b), z(c))))
#define BITWISE(n, T) \
    OP2("and.b" #n, T, T, T, a & b) OP2("or.b" #n, T, T, T, a | b) OP2("xor.b" #n, T, T, T, a ^ b) OP1("not.b" #n, T, T, ~a) \
    OP2("shl.b" #n, T, T, u32, shifted_left(a, b)) OP2("shr.b" #n, T, T, u32, shifted_right(a, b))
#define INTEGER(n, T) \
    OP2("add." #n, T, T, T, a + b) OP2("sub." #n, T, T, T, a - b) OP2("mul.lo." #n, T, T, T, a*b) \
    OP3("mad.lo." #n, T, T, T, T, a*b + c) OP2("div." #n, T, T, T, quotient(a, b)) OP2("rem." #n, T, T, T, remainder_of(a, b)) \
    OP2("min." #n, T, T, T, least(a, b)) OP2("max." #n, T, T, T, most(a, b)) OP2("shr." #n, T, T, u32, shifted_right(a, b)) \
    COMPARED("eq." #n, T, a == b) COMPARED("ne." #n, T, a != b) COMPARED("lt." #n, T, a < b) COMPARED("le." #n, T, a <= b) \
    COMPARED("gt." #n, T, a > b) COMPARED("ge." #n, T, a >= b)
#define SIGNED(n, T) INTEGER(n, T) OP1("neg." #n, T, T, 0 - a) OP1("abs." #n, T, T, a < 0 ? 0 - a : a)
#define COMPARED(name, T, x) OP2("setp." name, bool, T, T, x)
#define COMPARED_REAL(name, x) COMPARED(name ".f32", f32, x) COMPARED(name ".ftz.f32", f32, (a = z(a), b = z(b), x))
#define WIDE(n, T, W) OP2("mul.wide." #n, W, T, T, (W)a*b) OP3("mad.wide." #n, W, T, T, W, (W)a*b + c) \
    OP2("mul.hi." #n, T, T, T, (T)((W)a*b >> 8*sizeof(T)))
#define MOVED(n, T) OP1("mov." #n, T, T, a) OP("selp." #n, (Letters<T, T, T, bool>::text), PLAIN, select<T>(w, i))
#define FROM_INTEGER(n, T) OP1("cvt.rn.f32." #n, f32, T, (f32)a) OP1("cvt.rn.f64." #n, f64, T, (f64)a)
#define ROUNDED_TO_INTEGER(name, x) \
    OP1("cvt." name ".f32.f32", f32, f32, x) OP1("cvt." name ".ftz.f32.f32", f32, f32, z((a = z(a), x))) \
    TO_INTEGER(name, s32, x) TO_INTEGER(name, u32, x) TO_INTEGER(name, s64, x) TO_INTEGER(name, u64, x)
#define TO_INTEGER(name, T, x) \
    OP1("cvt." name "." #T ".f32", T, f32, to_integer<T>(x)) OP1("cvt." name ".ftz." #T ".f32", T, f32, to_integer<T>((a = z(a), x)))
#define PERMUTED(name, selectors) OP3("prmt.b32" name, u32, u32, u32, u32, permuted(a, b, selectors))
#define ADDRESS(name) OP1("cvta." name ".u64", u64, u64, a) OP1("cvta.to." name ".u64", u64, u64, a)
/* of b nothing counts where nothing is shifted */
#define FUNNEL(name, n, x) OP("shf." name ".b32", (Letters<u32, u32, u32, u32>::text), PLAIN, { \
    const u32 *o = i.operands, *u = w.undefined, *shift = lanes<u32>(w, o[3]); \
    u32 takes_both = 0; \
    for (int l = 0; l < N_LANES; l++) { const u32 c = shift[l]; takes_both |= (u32)((n) != 0) << l; } \
    const u32 undefined = u[o[1]] | u[o[3]] | (u[o[2]] & takes_both); \
    each<u32, u32, u32, u32>(w, i, [](u32 a, u32 b, u32 c) -> u32 { c = n; return x; }); \
    define(w, o[0], undefined); })
#define MULTIPLIED(shape, letters, K, ...) \
    OP("mma.sync.aligned." shape, letters, WARP_WHOLE, (multiply_matrices<K, __VA_ARGS__>(w, i)))
#define LEFT c < 32 ? (u32)(((u64)b << 32 | a) << c >> 32) : a
#define RIGHT c < 32 ? (u32)(((u64)b << 32 | a) >> c) : b

static const Op OPS[] = {
    /* 9.7.1 integers, 9.7.2 with carries */
    SIGNED(s16, s16) SIGNED(s32, s32) SIGNED(s64, s64) INTEGER(u16, u16) INTEGER(u32, u32) INTEGER(u64, u64)
    WIDE(s16, s16, s32) WIDE(u16, u16, u32) WIDE(s32, s32, s64) WIDE(u32, u32, u64)
    OP3("dp4a.s32.s32", s32, u32, u32, s32, (dot4<s8, s8>(a, b, c))) OP3("dp4a.u32.s32", s32, u32, u32, s32, (dot4<u8, s8>(a, b, c)))
    OP3("bfe.u32", u32, u32, u32, u32, field(a, b, c)) OP3("bfe.s32", s32, s32, u32, u32, field(a, b, c))
    OP("mad.lo.cc.u32", "4444", PLAIN, multiply_add_low(w, i)) OP("madc.hi.u32", "4444", PLAIN, multiply_add_high(w, i))
    OP4("bfi.b32", u32, u32, u32, u32, u32, field_inserted(a, b, c, e)) OP4("bfi.b64", u64, u64, u64, u32, u32, field_inserted(a, b, c, e))
    /* 9.7.3 floating point */
    ROUNDED2("add", a + b) ROUNDED2("sub", a - b) ROUNDED2("mul", a*b)
    FUSED(".rn", ) FUSED(".rz", RZ) FUSED(".rm", RM) FUSED(".rp", RP) OP3("fma.rn.f64", f64, f64, f64, f64, fma(a, b, c))
    REAL2("div.rn", a/b) REAL2("div.approx", divided_approximately(a, b)) REAL2("div.full", a/b)
    REAL2("min", least(a, b)) REAL2("max", most(a, b)) REAL1("abs", fabsf(a)) REAL1("neg", -a)
    REAL1("rcp.rn", 1.0f/a) REAL1("rcp.approx", 1.0f/a) REAL1("sqrt.rn", sqrtf(a)) REAL1("sqrt.approx", sqrtf(a))
    REAL1("rsqrt.approx", (f32)(1.0/sqrt((f64)a))) REAL1("ex2.approx", exp2f(a)) REAL1("lg2.approx", log2f(a))
    OP2("copysign.f32", f32, f32, f32, real((word(a) & 0x80000000u) | (word(b) & 0x7fffffffu)))
    /* 9.7.6 comparison, 9.7.7 with half precision: none */
    COMPARED("eq.b16", u16, a == b) COMPARED("eq.b32", u32, a == b) COMPARED("eq.b64", u64, a == b)
    COMPARED("ne.b16", u16, a != b) COMPARED("ne.b32", u32, a != b) COMPARED("ne.b64", u64, a != b)
    COMPARED_REAL("eq", a == b) COMPARED_REAL("ne", a < b || a > b) COMPARED_REAL("lt", a < b) COMPARED_REAL("le", a <= b)
    COMPARED_REAL("gt", a > b) COMPARED_REAL("ge", a >= b) COMPARED_REAL("equ", !(a < b || a > b)) COMPARED_REAL("neu", a != b)
    COMPARED_REAL("ltu", !(a >= b)) COMPARED_REAL("leu", !(a > b)) COMPARED_REAL("gtu", !(a <= b)) COMPARED_REAL("geu", !(a < b))
    COMPARED_REAL("num", a == a && b == b) COMPARED_REAL("nan", a != a || b != b)
    /* 9.7.8 bits and shifts */
    BITWISE(16, u16) BITWISE(32, u32) BITWISE(64, u64) OP1("popc.b32", u32, u32, (u32)__builtin_popcount(a))
    OP2("and.pred", bool, bool, bool, a & b) OP2("or.pred", bool, bool, bool, a | b) OP2("xor.pred", bool, bool, bool, a ^ b)
    OP1("not.pred", bool, bool, !a)
    FUNNEL("l.wrap", c & 31, LEFT) FUNNEL("l.clamp", c, LEFT) FUNNEL("r.wrap", c & 31, RIGHT) FUNNEL("r.clamp", c, RIGHT)
    /* 9.7.9 moving, conversion */
    MOVED(b16, u16) MOVED(b32, u32) MOVED(b64, u64) MOVED(s16, u16) MOVED(s32, u32) MOVED(s64, u64) MOVED(u16, u16)
    MOVED(u32, u32) MOVED(u64, u64) MOVED(f32, u32) MOVED(f64, u64) OP1("mov.pred", bool, bool, a)
    OP("mov.b32 pack", "422", PLAIN, (pack<u32, u16>(w, i))) OP("mov.b32 unpack", "224", PLAIN, (unpack<u32, u16>(w, i)))
    OP("mov.b64 pack", "844", PLAIN, (pack<u64, u32>(w, i))) OP("mov.b64 unpack", "448", PLAIN, (unpack<u64, u32>(w, i)))
    ADDRESS("global") ADDRESS("shared") ADDRESS("local") ADDRESS("const")
    PERMUTED("", c) PERMUTED(".f4e", chosen(F4E, c)) PERMUTED(".b4e", chosen(B4E, c)) PERMUTED(".rc8", chosen(RC8, c))
    PERMUTED(".ecl", chosen(ECL, c)) PERMUTED(".ecr", chosen(ECR, c)) PERMUTED(".rc16", chosen(RC16, c))
    OP("cvt integer", "??", PLAIN, convert_integer(w, i))
    FROM_INTEGER(s16, s16) FROM_INTEGER(u16, u16) FROM_INTEGER(s32, s32) FROM_INTEGER(u32, u32) FROM_INTEGER(s64, s64)
    FROM_INTEGER(u64, u64)
    ROUNDED_TO_INTEGER("rni", rintf(a)) ROUNDED_TO_INTEGER("rzi", truncf(a)) ROUNDED_TO_INTEGER("rmi", floorf(a))
    ROUNDED_TO_INTEGER("rpi", ceilf(a))
    OP1("cvt.sat.f32.f32", f32, f32, saturated(a)) OP1("cvt.ftz.sat.f32.f32", f32, f32, z(saturated(z(a))))
    OP1("cvt.f32.f16", f32, u16, from_half(a)) OP1("cvt.rn.f16.f32", u16, f32, to_half(a))
    OP2("cvt.rn.bf16x2.f32", u32, f32, f32, (u32)to_bf16(a) << 16 | to_bf16(b))
    OP1("cvt.f64.f32", f64, f32, a) OP1("cvt.rn.f32.f64", f32, f64, (f32)a) OP1("cvt.rn.ftz.f32.f64", f32, f64, z((f32)a))
    OP("ld", "*", PLAIN, load(w, i)) OP("st", "*", PLAIN, store(w, i)) OP("ld.param", "*", PLAIN, load_param(w, i))
    OP("cp.async.cg.shared.global", "mm44", PLAIN, copy_later(w, i)) OP("cp.async.commit_group", "", PLAIN, copy_commit(w))
    OP("cp.async.wait_group", "4", PLAIN, copy_wait(w, *lanes<u32>(w, i.operands[0])))
    OP("atom.global.cas.b32", "4m44", PLAIN, compare_and_swap(w, i))
    OP("shfl.sync.up.b32", "4p4444", WARP, shuffle<UP>(w, i)) OP("shfl.sync.down.b32", "4p4444", WARP, shuffle<DOWN>(w, i))
    OP("shfl.sync.bfly.b32", "4p4444", WARP, shuffle<BUTTERFLY>(w, i)) OP("shfl.sync.idx.b32", "4p4444", WARP, shuffle<INDEX>(w, i))
    /* 9.7.12 control, 9.7.13 synchronisation */
    OP("bra", "", BRANCH, ) OP("ret", "", EXIT, ) OP("exit", "", EXIT, ) OP("bar.sync", "4", BLOCK, ) OP("fence", "", PLAIN, )
    OP("griddepcontrol.launch_dependents", "", PLAIN, w.early |= w.active) OP("griddepcontrol.wait", "", PLAIN, w.early &= ~w.active)
    OP("bar.warp.sync", "4", WARP_WHOLE, whole_mask(w, i.operands[0]), synchronise(w))
    OP("vote.sync.any.pred", "pp4", WARP, vote_any(w, i))
    /* 9.7.14 matrices */
    OP("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "4444m", WARP_WHOLE, load_matrices(w, i, false))
    OP("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "4444m", WARP_WHOLE, load_matrices(w, i, true))
    MULTIPLIED("m16n8k8.row.col.f32.f16.f16.f32", "44444444444", 8, Half, Half)
    MULTIPLIED("m16n8k16.row.col.f32.f16.f16.f32", "44444444444444", 16, Half, Half)
    MULTIPLIED("m16n8k16.row.col.f32.bf16.bf16.f32", "44444444444444", 16, Bfloat, Bfloat)
    MULTIPLIED("m16n8k8.row.col.f32.tf32.tf32.f32", "44444444444444", 8, Tf32, Tf32)
    MULTIPLIED("m16n8k16.row.col.s32.s8.s8.s32", "44444444444", 16, Byte<s8>, Byte<s8>)
    MULTIPLIED("m16n8k16.row.col.s32.u8.s8.s32", "44444444444", 16, Byte<u8>, Byte<s8>)
    MULTIPLIED("m16n8k32.row.col.s32.s8.s8.s32", "44444444444444", 32, Byte<s8>, Byte<s8>)
    MULTIPLIED("m16n8k32.row.col.s32.u8.s8.s32", "44444444444444", 32, Byte<u8>, Byte<s8>)
};
