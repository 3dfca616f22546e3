/* Dequantised rows of IQ1, IQ2 and IQ3: eight elements (in IQ3 twice four) are an entry of a grid, with signs or an offset.

   The grids are ggml's, as words of int8 elements (grids.h). Included by rows_k.h. */
#include "grids.h"
TABLE u64_t grid_iq1[] = {GRID_iq1_s};
TABLE u64_t grid_iq2_xxs[] = {GRID_iq2_xxs}, grid_iq2_xs[] = {GRID_iq2_xs}, grid_iq2_s[] = {GRID_iq2_s};
TABLE uint grid_iq3_xxs[] = {GRID_iq3_xxs}, grid_iq3_s[] = {GRID_iq3_s};
#define ENTRY8(grid, i) F8_FROM_I8(U8_FROM_WORD(grid[i]))
#define ENTRY4X2(grid, i, j) F8_FROM_I8(U8_FROM_WORD((u64_t)grid[i] | (u64_t)grid[j] << 32))
#define USHORT_AT(p) (*(CGLOBAL ushort *)(p))
#define UINT_AT(p) ((uint)USHORT_AT(p) | (uint)USHORT_AT((p) + 2) << 16)   /* blocks are aligned to two bytes */
#define NIBBLE_AT(p, i) (BYTE((p) + ((i) >> 1)) >> 4*((i) & 1) & 15)

/* seven sign bits and an eighth that makes their number even */
DEVICE_FN uint even_signs(uint s)
{
    s &= 127u;
    return s | (0x6996u >> ((s ^ s >> 4) & 15u) & 1u) << 7;
}

TRAITS(iq2_xxs, 4, 4, 0)
#define WORDS_AT_ (b + QS_iq2_xxs + 8*(r >> 2))   /* four indices; four sets of signs and a scale */
RAW8(iq2_xxs)
{
    return F8_NEGATED(ENTRY8(grid_iq2_xxs, BYTE(WORDS_AT_ + (r & 3))), even_signs(UINT_AT(WORDS_AT_ + 4) >> 7*(r & 3)));
}
SCALE(iq2_xxs) { return LOAD_HALF(b + D_iq2_xxs)*0.25f*((float)(BYTE(WORDS_AT_ + 7) >> 4) + 0.5f); }
NO_MIN(iq2_xxs)
DEQ8_FN(iq2_xxs)

TRAITS(iq2_xs, 2, 4, 0)
RAW8(iq2_xs)
{
    const uint code = USHORT_AT(b + QS_iq2_xs + 2*r);
    return F8_NEGATED(ENTRY8(grid_iq2_xs, code & 511u), even_signs(code >> 9));
}
SCALE(iq2_xs) { return LOAD_HALF(b + D_iq2_xs)*0.25f*((float)NIBBLE_AT(b + SCALES_iq2_xs, r >> 1) + 0.5f); }
NO_MIN(iq2_xs)
DEQ8_FN(iq2_xs)

TRAITS(iq2_s, 2, 4, 0)
RAW8(iq2_s)
{
    const uint high = BYTE(b + QH_iq2_s + (r >> 2)) >> 2*(r & 3) & 3;
    return F8_NEGATED(ENTRY8(grid_iq2_s, BYTE(b + QS_iq2_s + r) | high << 8), BYTE(b + SIGNS_iq2_s + r));
}
SCALE(iq2_s) { return LOAD_HALF(b + D_iq2_s)*0.25f*((float)NIBBLE_AT(b + SCALES_iq2_s, r >> 1) + 0.5f); }
NO_MIN(iq2_s)
DEQ8_FN(iq2_s)

TRAITS(iq3_xxs, 4, 4, 0)
#define SIGNS_AT_ (b + SIGNS_iq3_xxs + 4*(r >> 2))
RAW8(iq3_xxs)
{
    CGLOBAL char *q = b + QS_iq3_xxs + 2*r;
    return F8_NEGATED(ENTRY4X2(grid_iq3_xxs, BYTE(q), BYTE(q + 1)), even_signs(UINT_AT(SIGNS_AT_) >> 7*(r & 3)));
}
SCALE(iq3_xxs) { return LOAD_HALF(b + D_iq3_xxs)*0.5f*((float)(BYTE(SIGNS_AT_ + 3) >> 4) + 0.5f); }
NO_MIN(iq3_xxs)
DEQ8_FN(iq3_xxs)

TRAITS(iq3_s, 4, 4, 0)
RAW8(iq3_s)
{
    CGLOBAL char *q = b + QS_iq3_s + 2*r;
    const uint high = BYTE(b + QH_iq3_s + (r >> 2)) >> 2*(r & 3);
    return F8_NEGATED(ENTRY4X2(grid_iq3_s, BYTE(q) | (high & 1u) << 8, BYTE(q + 1) | (high & 2u) << 7),
                      BYTE(b + SIGNS_iq3_s + r));
}
SCALE(iq3_s) { return LOAD_HALF(b + D_iq3_s)*(2.0f*(float)NIBBLE_AT(b + SCALES_iq3_s, r >> 2) + 1.0f); }
NO_MIN(iq3_s)
DEQ8_FN(iq3_s)

/* IQ1: the entry plus or minus 1/8 */
#define EIGHTH(is_negative) ((is_negative) ? -0.125f : 0.125f)
TRAITS(iq1_s, 4, 4, 0)
#define WORD_OF_IQ1_S_ USHORT_AT(b + QH_iq1_s + 2*(r >> 2))
RAW8(iq1_s)
{
    const uint word = WORD_OF_IQ1_S_, high = word >> 3*(r & 3) & 7u;
    return ENTRY8(grid_iq1, BYTE(b + QS_iq1_s + r) | high << 8) + EIGHTH(word >> 15);
}
SCALE(iq1_s) { return LOAD_HALF(b + D_iq1_s)*(float)(2*(WORD_OF_IQ1_S_ >> 12 & 7) + 1); }
NO_MIN(iq1_s)
DEQ8_FN(iq1_s)

/* the highest digits of four words are the block's scale; below them, each has four scales of three bits */
TRAITS(iq1_m, 2, 4, 0)
#define DIGIT_(i) (uint)(USHORT_AT(b + SCALES_iq1_m + 2*(i)) >> 12) << 4*(i)
RAW8(iq1_m)
{
    const uint high = NIBBLE_AT(b + QH_iq1_m, r);
    return ENTRY8(grid_iq1, BYTE(b + QS_iq1_m + r) | (high & 7u) << 8) + EIGHTH(high >> 3);
}
SCALE(iq1_m)
{
    const float d = HALF_FROM_BITS((ushort)(DIGIT_(0) | DIGIT_(1) | DIGIT_(2) | DIGIT_(3)));
    return d*(float)(2*(USHORT_AT(b + SCALES_iq1_m + 2*(r >> 3)) >> 3*(r >> 1 & 3) & 7) + 1);
}
NO_MIN(iq1_m)
DEQ8_FN(iq1_m)
