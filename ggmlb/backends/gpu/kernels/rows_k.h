/* Dequantised rows of K-quants and similar types: blocks of 256, with sub-blocks whose scales have few bits. */
#include "rows.h"

/* 6-bit scale and min of a sub-block of 32, from the 12 bytes of q4_K and q5_K */
DEVICE_FN float k4_scale(CGLOBAL char *s, int i)
{
    return (float)(i < 4 ? BYTE(s + i) & 63 : (BYTE(s + i + 4) & 15) | BYTE(s + i - 4) >> 6 << 4);
}
DEVICE_FN float k4_min(CGLOBAL char *s, int i)
{
    return (float)(i < 4 ? BYTE(s + i + 4) & 63 : BYTE(s + i + 4) >> 4 | BYTE(s + i) >> 6 << 4);
}

/* 2 bits: 128 elements in 32 bytes, the first 32 in the lowest bits */
#define HALF_(r)    ((r) >> 4)
#define QUARTER_(r) ((r) >> 2 & 3)
#define PLACE_(r)   (8*((r) & 3))
#define BITS_AT_(p, shift, mask) ((U8_AT(p) >> U8_SPLAT((uchar)(shift))) & U8_SPLAT(mask))
#define TWO_BITS(p) BITS_AT_((p) + 32*HALF_(r) + PLACE_(r), 2*QUARTER_(r), 3)

TRAITS(q2_k, 2, 16, 1)
RAW8(q2_k) { return F8_FROM_U8(TWO_BITS(b + QS_q2_k)); }
SCALE(q2_k) { return LOAD_HALF(b + D_q2_k)*(float)(BYTE(b + SCALES_q2_k + (r >> 1)) & 15); }
MIN(q2_k) { return LOAD_HALF(b + DMIN_q2_k)*(float)(BYTE(b + SCALES_q2_k + (r >> 1)) >> 4); }
DEQ8_FN(q2_k)

TRAITS(q3_k, 2, 32, 0)
RAW8(q3_k)
{
    return F8_FROM_U8(TWO_BITS(b + QS_q3_k) | (BITS_AT_(b + HMASK_q3_k + PLACE_(r), r >> 2, 1) << U8_SPLAT(2))) - 4.0f;
}
SCALE(q3_k)
{
    CGLOBAL char *s = b + SCALES_q3_k;
    const int i = r >> 1, low = BYTE(s + (i & 7)) >> (4*(i >> 3)) & 15;
    return LOAD_HALF(b + D_q3_k)*(float)((low | (BYTE(s + 8 + (i & 3)) >> (2*(i >> 2)) & 3) << 4) - 32);
}
NO_MIN(q3_k)
DEQ8_FN(q3_k)

TRAITS(q4_k, 4, 8, 1)
RAW8(q4_k) { return F8_FROM_U8(NIBBLES(b + QS_q4_k + 32*(r >> 3) + PLACE_(r), r >> 2 & 1)); }
SCALE(q4_k) { return LOAD_HALF(b + D_q4_k)*k4_scale(b + SCALES_q4_k, r >> 2); }
MIN(q4_k) { return LOAD_HALF(b + DMIN_q4_k)*k4_min(b + SCALES_q4_k, r >> 2); }
DEQ8_FN(q4_k)

TRAITS(q5_k, 4, 32, 1)
RAW8(q5_k)
{
    const U8 low = NIBBLES(b + QS_q5_k + 32*(r >> 3) + PLACE_(r), r >> 2 & 1);
    return F8_FROM_U8(low | (BITS_AT_(b + QH_q5_k + PLACE_(r), r >> 2, 1) << U8_SPLAT(4)));
}
SCALE(q5_k) { return LOAD_HALF(b + D_q5_k)*k4_scale(b + SCALES_q5_k, r >> 2); }
MIN(q5_k) { return LOAD_HALF(b + DMIN_q5_k)*k4_min(b + SCALES_q5_k, r >> 2); }
DEQ8_FN(q5_k)

TRAITS(q6_k, 2, 16, 0)
RAW8(q6_k)
{
    const U8 low = NIBBLES(b + QL_q6_k + 64*HALF_(r) + 32*(QUARTER_(r) & 1) + PLACE_(r), QUARTER_(r) >> 1);
    return F8_FROM_U8(low | (TWO_BITS(b + QH_q6_k) << U8_SPLAT(4))) - 32.0f;
}
SCALE(q6_k) { return LOAD_HALF(b + D_q6_k)*(float)(i8_t)BYTE(b + SCALES_q6_k + (r >> 1)); }
NO_MIN(q6_k)
DEQ8_FN(q6_k)

TRAITS(q8_k, 32, 4, 0)
RAW8(q8_k) { return F8_FROM_I8(U8_AT(b + QS_q8_k + 8*r)); }
SCALE(q8_k) { return ld_f32(b + D_q8_k); }
NO_MIN(q8_k)
DEQ8_FN(q8_k)

TRAITS(iq4_xs, 4, 4, 0)
RAW8(iq4_xs) { return F8_LOOKUP(values_iq4nl, NIBBLES(b + QS_iq4_xs + 16*(r >> 2) + 8*(r & 1), r >> 1 & 1)); }
SCALE(iq4_xs)
{
    const int i = r >> 2;
    const uint s = (BYTE(b + SCALES_L_iq4_xs + (i >> 1)) >> (4*(i & 1)) & 15) | (BYTES2(b + SCALES_H_iq4_xs) >> (2*i) & 3) << 4;
    return LOAD_HALF(b + D_iq4_xs)*((float)s - 32.0f);
}
NO_MIN(iq4_xs)
DEQ8_FN(iq4_xs)

/* ternary types tq2_0 and tq1_0: elements -1, 0, 1 times a scale */
TRAITS(tq2_0, 32, 16, 0)
RAW8(tq2_0) { return F8_FROM_U8(TWO_BITS(b + QS_tq2_0)) - 1.0f; }
ONE_SCALE_(tq2_0)
NO_MIN(tq2_0)
DEQ8_FN(tq2_0)

/* five base-3 digits per byte, as a fraction of 256: 160 elements, then 80, then 16 with four per byte */
TRAITS(tq1_0, 32, 4, 0)
#define BYTE3_(j)  BYTE(b + (r < 20 ? QS_tq1_0 + PLACE_(r) + j : r < 30 ? QS2_tq1_0 + 8*(r & 1) + j : QH_tq1_0 + (j & 3)))
#define DIGIT3_(j) (r < 20 ? r >> 2 : r < 30 ? (r - 20) >> 1 : 2*(r - 30) + (j >> 2))
#define TRIT_(j)   ((uchar)((((uint)BYTE3_(j)*power3(DIGIT3_(j)) & 255u)*3u) >> 8))
DEVICE_FN uint power3(int n) { return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81; }
RAW8(tq1_0) { return F8_FROM_U8(MAKE_U8(TRIT_)) - 1.0f; }
ONE_SCALE_(tq1_0)
NO_MIN(tq1_0)
DEQ8_FN(tq1_0)

#include "rows_iq.h"
