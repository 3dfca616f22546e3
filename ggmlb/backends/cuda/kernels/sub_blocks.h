/* Sub-blocks of 32 elements of a quantised row, unpacked to integers for dot products with 8-bit activations.

   A block is read from a tile: a range of the row's bytes in shared memory; the block begins at byte `at`. For type T:

       quants_T<N>(tile, at, i, q, first)       quants of sub-block i in words of four bytes: from each half of 16 elements the
                                                N words from word `first` on (all eight: N = 4, first = 0)
       SHIFT_T                                  constant to subtract from each quant
       UNSIGNED_T                               whether quants are unsigned bytes (up to 240), not signed ones
       scales_T(tile, at, i, d, scale, mins)    per half of the sub-block: element = d[0]*scale*quant - d[1]*mins,
                                                with integer scale and mins

   ALIGN is the alignment of every row: a power of two, up to 16; PER_TILE the number of sub-blocks of a tile. */
#include "mul_mat.h"

#define OF_A(name) OF_TYPE(name, a)
#define SUB_BLOCKS (OF_A(GROUPS)/4)                              /* sub-blocks per block of a's type */
#define HALF_SCALES (OF_A(SHARE) < 4)
#define TILE_BYTES (PER_TILE/SUB_BLOCKS*OF_A(BYTES))
#define SKEWED (ALIGN % 16 != 0 || TILE_BYTES % 16 != 0)
#define VECTORS ((TILE_BYTES + (SKEWED ? 15 : 0) + 15)/16)   /* aligned 16-byte vectors of a row's tile, at most */
/* misalignment of a tile: its address modulo 16; p is the address, or a multiple of 16 bytes further */
DEVICE_FN int skew_of(CGLOBAL char *p, int tile)
{ return !SKEWED ? 0 : ALIGN % 16 == 0 ? (tile*TILE_BYTES) & 15 : (int)((size_t)p & 15); }

#define QUANTS(T) template <int N> DEVICE_FN void quants_##T(const uint *tile, int at, int i, int *q, int first)
#define SCALES(T) DEVICE_FN void scales_##T(const uint *tile, int at, int i, float *d, int *scale, int *mins)
#define EACH_WORD(n) UNROLL for (int j = 0; j < (n); j++)

#define IN_WORDS (ALIGN % 4 == 0 && OF_TYPE(BYTES, a) % 4 == 0)
#define IN_VECTORS (ALIGN % 16 == 0 && OF_TYPE(BYTES, a) % 16 == 0)

/* Load n words from any byte address and shift every byte right by `up` bits: its high bits become undefined. A negative
   `up` shifts left, the low bits become undefined, and memory before `at` is read. */
template <int N> DEVICE_FN void words_at(const uint *tile, int at, int *w, int up = 0)
{
    uint from[N + 1];
    const int bit = IN_WORDS ? 8*at : 8*at + up;
    if (IN_VECTORS && N % 4 == 0) {
        EACH_WORD(N/4) {
            const uint4 v = ((const uint4 *)tile)[(at >> 4) + j];
            from[4*j] = v.x; from[4*j + 1] = v.y; from[4*j + 2] = v.z; from[4*j + 3] = v.w;
        }
    } else {
        EACH_WORD(N + !IN_WORDS) from[j] = tile[(bit >> 5) + j];
    }
    EACH_WORD(N) w[j] = (int)__funnelshift_r(from[j], from[IN_WORDS ? j : j + 1], (uint)(IN_WORDS ? up : bit) & 31);
}
/* spread four bits over the lowest bits of four bytes */
DEVICE_FN int spread4(uint bits) { return (int)((bits & 15u)*0x00204081u & 0x01010101u); }

/* look up the low and the high nibbles of a word in a table of 16 bytes */
DEVICE_FN void lookup(const uint *table, uint w, int *low, int *high)
{
    uint v[2];
    EACH_WORD(2) {
        const uint s = w >> 16*j;
        v[j] = __byte_perm(__byte_perm(table[0], table[1], s & 0x7777u), __byte_perm(table[2], table[3], s & 0x7777u),
                           0x3210u | (s & 0x8888u) >> 1);
    }
    *low = (int)__byte_perm(v[0], v[1], 0x6420u);
    *high = (int)__byte_perm(v[0], v[1], 0x7531u);
}
#define TABLE_IQ4NL const uint table[4] = {LEVEL_WORDS_iq4_nl};
#define TABLE_E2M1  const uint table[4] = {LEVEL_WORDS_mxfp4};

/* load words of both halves of 32 bytes */
template <int N> DEVICE_FN void halves_at(const uint *tile, int start, int first, int *w, int up = 0)
{
    if (N == 4) words_at<8>(tile, start, w, up);
    else UNROLL for (int h = 0; h < 2; h++) words_at<N>(tile, start + 16*h + 4*first, w + N*h, up);
}

/* unpack 16 bytes of nibbles: the low ones are the first half of the sub-block */
#define NIBBLE_HALVES(offset) \
    int w[N]; words_at<N>(tile, at + (offset) + 4*first, w); \
    EACH_WORD(N) { q[j] = w[j] & 0x0f0f0f0f; q[j + N] = w[j] >> 4 & 0x0f0f0f0f; }
#define TABLE_HALVES(TABLE, offset) \
    TABLE int w[N]; words_at<N>(tile, at + (offset) + 4*first, w); \
    EACH_WORD(N) lookup(table, (uint)w[j], q + j, q + j + N);
/* from each of 32 bytes take the bits of this sub-block: shift by `up`, then mask */
#define BITS_OF_32(offset, up, mask) \
    { int w[2*N]; halves_at<N>(tile, at + (offset), first, w, up); EACH_WORD(2*N) q[j] = w[j] & (mask); }
#define ADD_BITS_OF_32(offset, up, mask) \
    { int w[2*N]; halves_at<N>(tile, at + (offset), first, w, up); EACH_WORD(2*N) q[j] |= w[j] & (mask); }
#define ADD_FIFTH_BITS(offset) { \
    int bits; \
    words_at<1>(tile, at + (offset), &bits); \
    bits = (int)((uint)bits >> 4*first); \
    EACH_WORD(2*N) q[j] |= spread4((uint)bits >> (4*(j % N) + 16*(j/N))) << 4; \
    }

enum { SHIFT_q4_0 = 8, SHIFT_q4_1 = 0, SHIFT_q5_0 = 16, SHIFT_q5_1 = 0, SHIFT_q8_0 = 0, SHIFT_iq4_nl = 0, SHIFT_mxfp4 = 0,
       SHIFT_q2_k = 0, SHIFT_q3_k = 4, SHIFT_q4_k = 0, SHIFT_q5_k = 0, SHIFT_q6_k = 32, SHIFT_iq4_xs = 0 };

enum { UNSIGNED_q4_0 = 0, UNSIGNED_q4_1 = 0, UNSIGNED_q5_0 = 0, UNSIGNED_q5_1 = 0, UNSIGNED_q8_0 = 0, UNSIGNED_iq4_nl = 0,
       UNSIGNED_mxfp4 = 0, UNSIGNED_q2_k = 1, UNSIGNED_q3_k = 0, UNSIGNED_q4_k = 1, UNSIGNED_q5_k = 0, UNSIGNED_q6_k = 0,
       UNSIGNED_iq4_xs = 0 };

QUANTS(q4_0)   { NIBBLE_HALVES(QS_q4_0) }
QUANTS(q4_1)   { NIBBLE_HALVES(QS_q4_1) }
QUANTS(q5_0)   { NIBBLE_HALVES(QS_q5_0) ADD_FIFTH_BITS(QH_q5_0) }
QUANTS(q5_1)   { NIBBLE_HALVES(QS_q5_1) ADD_FIFTH_BITS(QH_q5_1) }
QUANTS(q8_0)   { halves_at<N>(tile, at + QS_q8_0, first, q); }
QUANTS(iq4_nl) { TABLE_HALVES(TABLE_IQ4NL, QS_iq4_nl) }
QUANTS(mxfp4)  { TABLE_HALVES(TABLE_E2M1, QS_mxfp4) }
QUANTS(iq4_xs) { TABLE_HALVES(TABLE_IQ4NL, QS_iq4_xs + 16*i) }
QUANTS(q2_k)                         /* not shifted down: 1, 4, 16 or 64 times the quants; d is divided by that factor */
{
    halves_at<N>(tile, at + QS_q2_k + 32*(i >> 2), first, q);
    EACH_WORD(2*N) q[j] &= 0x03030303 << 2*(i & 3);
}
QUANTS(q3_k)
{
    BITS_OF_32(QS_q3_k + 32*(i >> 2), 2*(i & 3), 0x03030303)
    int w[2*N];
    halves_at<N>(tile, at + HMASK_q3_k, first, w, i);
    EACH_WORD(2*N) q[j] |= (w[j] & 0x01010101) << 2;
}
QUANTS(q4_k)                         /* not shifted down: 16 times the quants in odd sub-blocks; d is divided by 16 */
{
    halves_at<N>(tile, at + QS_q4_k + 32*(i >> 1), first, q);
    EACH_WORD(2*N) q[j] &= 0x0f0f0f0f << 4*(i & 1);
}
QUANTS(q5_k)
{
    BITS_OF_32(QS_q5_k + 32*(i >> 1), 4*(i & 1), 0x0f0f0f0f)
    ADD_BITS_OF_32(QH_q5_k, i - 4, 0x10101010)
}
QUANTS(q6_k)
{
    BITS_OF_32(QL_q6_k + 64*(i >> 2) + 32*(i & 1), 4*(i >> 1 & 1), 0x0f0f0f0f)
    ADD_BITS_OF_32(QH_q6_k + 32*(i >> 2), 2*(i & 3) - 4, 0x30303030)
}

DEVICE_FN uint pair_at(const uint *tile, int at) { return *(const ushort *)((const char *)tile + at); }
DEVICE_FN float half_at(const uint *tile, int at) { return half_to_float_((ushort)pair_at(tile, at)); }

/* types with one scale (and min) per sub-block of 32 */
#define ONE_SCALE(T) \
    SCALES(T) \
    { \
        CGLOBAL char *b = (CGLOBAL char *)tile + at; \
        d[0] = scale_##T(b, 4*i); \
        d[1] = min_##T(b, 4*i); \
        EACH_HALF scale[h] = mins[h] = 1; \
    }
#define EACH_HALF UNROLL for (int h = 0; h < 2; h++)
ONE_SCALE(q4_0)
ONE_SCALE(q4_1)
ONE_SCALE(q5_0)
ONE_SCALE(q5_1)
ONE_SCALE(q8_0)
ONE_SCALE(iq4_nl)
ONE_SCALE(mxfp4)
SCALES(iq4_xs)
{
    int w[2];
    words_at<2>(tile, at + D_iq4_xs, w);
    d[0] = half_to_float_((ushort)w[0]);
    scale[0] = scale[1] = ((w[1] >> 4*i & 15) | (w[0] >> (16 + 2*i) & 3) << 4) - 32;
}
/* q2_k: one byte holds scale and min of half a sub-block (16 elements) */
SCALES(q2_k)
{
    const uint s = pair_at(tile, at + SCALES_q2_k + 2*i);
    d[0] = half_at(tile, at + D_q2_k)*AS_FLOAT((uint)(127 - 2*(i & 3)) << 23);
    d[1] = half_at(tile, at + DMIN_q2_k);
    EACH_HALF { scale[h] = (int)(s >> 8*h & 15u); mins[h] = (int)(s >> (8*h + 4) & 15u); }
}
SCALES(q3_k)
{
    const uint low = pair_at(tile, at + SCALES_q3_k + 2*(i & 3)) >> 4*(i >> 2) & 0x0f0fu;
    const uint s = low | (pair_at(tile, at + SCALES_q3_k + 8 + 2*(i & 1)) >> 2*(i >> 1) & 0x0303u) << 4;
    d[0] = half_at(tile, at + D_q3_k);
    EACH_HALF scale[h] = (int)(s >> 8*h & 63u) - 32;
}
SCALES(q6_k)
{
    const uint s = pair_at(tile, at + SCALES_q6_k + 2*i);
    d[0] = half_at(tile, at + D_q6_k);
    scale[0] = (int)(i8_t)s;
    scale[1] = (int)(i8_t)(s >> 8);
}
/* q4_K, q5_K: d, dmin, then 6-bit scales and mins; those of the last four sub-blocks are stored in two parts */
DEVICE_FN void scales_of_six(const uint *tile, int at, int i, float *d, int *scale, int *mins)
{
    const bool whole = i < 4;
    const int shift = 8*(i & 3), low = whole ? 63 : 15, high = whole ? 0 : 48;
    int w[4];
    words_at<4>(tile, at + D_q4_k, w);
    d[0] = half_to_float_((ushort)w[0]);
    d[1] = half_to_float_((ushort)((uint)w[0] >> 16));
    scale[0] = scale[1] = ((whole ? w[1] : w[3]) >> shift & low) | (w[1] >> (shift + 2) & high);
    mins[0] = mins[1] = ((whole ? w[2] : w[3]) >> (whole ? shift : shift + 4) & low) | (w[2] >> (shift + 2) & high);
}
SCALES(q4_k)
{
    scales_of_six(tile, at, i, d, scale, mins);
    d[0] *= i & 1 ? 0.0625f : 1.0f;
}
SCALES(q5_k) { scales_of_six(tile, at, i, d, scale, mins); }

#include "sub_blocks_iq.h"
#ifndef HAS_GRIDS
#define HAS_GRIDS 0   /* whether quants are entries of tables */
#endif
