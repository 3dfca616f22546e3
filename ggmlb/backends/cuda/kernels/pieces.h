/* Pieces: 32 neighbouring elements of a quantised row as integers, for products with activations in 8 bits.

   A block is read from a tile: a stretch of the row's bytes in shared memory, from the byte `at` on. Its scales are
   those of rows.h and rows_k.h; here its numbers become eight words of four signed bytes, in the elements' order:

       integers_T(tile, at, i, q)     piece i of the block at `at`
       SHIFT_T                        what the numbers are too great by

   ALIGN is the power of two, up to 16, that every row begins at a multiple of. */
#include "mul_mat.h"

#define INTEGERS(T) DEVICE_FN void integers_##T(const uint *tile, int at, int i, int *q)
#define EACH_WORD(n) UNROLL for (int j = 0; j < (n); j++)

#define IN_WORDS (ALIGN % 4 == 0 && OF_TYPE(BYTES, a) % 4 == 0)

/* n words from any byte on */
template <int N> DEVICE_FN void words_at(const uint *tile, int at, int *w)
{
    const uint *from = tile + (at >> 2);
    if (IN_WORDS) {
        EACH_WORD(N) w[j] = (int)from[j];
    } else {
        const uint shift = 8*((uint)at & 3);
        uint low = from[0];
        EACH_WORD(N) { const uint high = from[j + 1]; w[j] = (int)__funnelshift_r(low, high, shift); low = high; }
    }
}
/* four bits become the bits 0 of four bytes */
DEVICE_FN int spread4(uint bits) { return (int)((bits & 15u)*0x00204081u & 0x01010101u); }

/* the bytes of a table of 16 that the low, and the high, nibbles of a word point at */
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
#define TABLE_IQ4NL const uint table[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
#define TABLE_E2M1  const uint table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};

/* 16 bytes of nibbles: the first half of the piece in the low ones */
#define NIBBLE_HALVES(offset) \
    int w[4]; words_at<4>(tile, at + (offset), w); \
    EACH_WORD(4) { q[j] = w[j] & 0x0f0f0f0f; q[j + 4] = w[j] >> 4 & 0x0f0f0f0f; }
#define TABLE_HALVES(TABLE, offset) \
    TABLE int w[4]; words_at<4>(tile, at + (offset), w); \
    EACH_WORD(4) lookup(table, (uint)w[j], q + j, q + j + 4);
/* 32 bytes, of which the piece has some bits of each */
#define BITS_OF_32(offset, shift, mask) \
    { int w[8]; words_at<8>(tile, at + (offset), w); EACH_WORD(8) q[j] = w[j] >> (shift) & (mask); }
#define ADD_BITS_OF_32(offset, shift, mask, up) \
    { int w[8]; words_at<8>(tile, at + (offset), w); EACH_WORD(8) q[j] |= (w[j] >> (shift) & (mask)) << (up); }
#define ADD_FIFTH_BITS(offset) \
    { int bits; words_at<1>(tile, at + (offset), &bits); EACH_WORD(8) q[j] |= spread4((uint)bits >> 4*j) << 4; }

enum { SHIFT_q4_0 = 8, SHIFT_q4_1 = 0, SHIFT_q5_0 = 16, SHIFT_q5_1 = 0, SHIFT_q8_0 = 0, SHIFT_iq4_nl = 0, SHIFT_mxfp4 = 0,
       SHIFT_q2_k = 0, SHIFT_q3_k = 4, SHIFT_q4_k = 0, SHIFT_q5_k = 0, SHIFT_q6_k = 32, SHIFT_iq4_xs = 0 };

INTEGERS(q4_0)   { NIBBLE_HALVES(2) }
INTEGERS(q4_1)   { NIBBLE_HALVES(4) }
INTEGERS(q5_0)   { NIBBLE_HALVES(6) ADD_FIFTH_BITS(2) }
INTEGERS(q5_1)   { NIBBLE_HALVES(8) ADD_FIFTH_BITS(4) }
INTEGERS(q8_0)   { words_at<8>(tile, at + 2, q); }
INTEGERS(iq4_nl) { TABLE_HALVES(TABLE_IQ4NL, 2) }
INTEGERS(mxfp4)  { TABLE_HALVES(TABLE_E2M1, 1) }
INTEGERS(iq4_xs) { TABLE_HALVES(TABLE_IQ4NL, 8 + 16*i) }
INTEGERS(q2_k)   { BITS_OF_32(16 + 32*(i >> 2), 2*(i & 3), 0x03030303) }
INTEGERS(q3_k)
{
    BITS_OF_32(32 + 32*(i >> 2), 2*(i & 3), 0x03030303)
    ADD_BITS_OF_32(0, i, 0x01010101, 2)
}
INTEGERS(q4_k)   { BITS_OF_32(16 + 32*(i >> 1), 4*(i & 1), 0x0f0f0f0f) }
INTEGERS(q5_k)
{
    BITS_OF_32(48 + 32*(i >> 1), 4*(i & 1), 0x0f0f0f0f)
    ADD_BITS_OF_32(16, i, 0x01010101, 4)
}
INTEGERS(q6_k)
{
    BITS_OF_32(64*(i >> 2) + 32*(i & 1), 4*(i >> 1 & 1), 0x0f0f0f0f)
    ADD_BITS_OF_32(128 + 32*(i >> 2), 2*(i & 3), 0x03030303, 4)
}
