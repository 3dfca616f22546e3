/* Rows of the K-quants and their kin: blocks of 256, whose smaller blocks have scales of few bits. */
#include "rows.h"

/* 6-bit scale and minimum of 32 elements, in the 12 bytes of q4_K and q5_K */
DEVICE_FN int k4_scale(CGLOBAL char *s, int i)
{
    return i < 4 ? BYTE(s + i) & 63 : (BYTE(s + i + 4) & 15) | BYTE(s + i - 4) >> 6 << 4;
}
DEVICE_FN int k4_min(CGLOBAL char *s, int i)
{
    return i < 4 ? BYTE(s + i + 4) & 63 : BYTE(s + i + 4) >> 4 | BYTE(s + i) >> 6 << 4;
}

/* 2 bits: 128 elements in 32 bytes, the first 32 in their lowest bits */
#define HALF_(r)    ((r) >> 4)
#define QUARTER_(r) ((r) >> 2 & 3)
#define PLACE_(r)   (8*((r) & 3))
#define TWO_BITS(p) ((U8_AT((p) + 32*HALF_(r) + PLACE_(r)) >> U8_SPLAT((uchar)(2*QUARTER_(r)))) & U8_SPLAT(3))

DEVICE_FN F8 deq8_q2_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 84);
    const int s = BYTE(b + (r >> 1));
    return F8_FROM_U8(TWO_BITS(b + 16))*(LOAD_HALF(b + 80)*(float)(s & 15)) - LOAD_HALF(b + 82)*(float)(s >> 4);
}
DEVICE_FN F8 deq8_q3_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 110);
    const int i = r >> 1, low = i < 8 ? BYTE(b + 96 + i) & 15 : BYTE(b + 88 + i) >> 4;
    const int s = low | (BYTE(b + 104 + (i & 3)) >> (2*(i >> 2)) & 3) << 4;
    const U8 high = (U8_AT(b + PLACE_(r)) >> U8_SPLAT((uchar)(r >> 2))) & U8_SPLAT(1);
    return (F8_FROM_U8(TWO_BITS(b + 32) | (high << U8_SPLAT(2))) - 4.0f)*(LOAD_HALF(b + 108)*(float)(s - 32));
}
DEVICE_FN F8 deq8_q4_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 144);
    const U8 q = NIBBLES(b + 16 + 32*(r >> 3) + PLACE_(r), r >> 2 & 1);
    return F8_FROM_U8(q)*(LOAD_HALF(b)*(float)k4_scale(b + 4, r >> 2)) - LOAD_HALF(b + 2)*(float)k4_min(b + 4, r >> 2);
}
DEVICE_FN F8 deq8_q5_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 176);
    const U8 high = (U8_AT(b + 16 + PLACE_(r)) >> U8_SPLAT((uchar)(r >> 2))) & U8_SPLAT(1);
    const U8 q = NIBBLES(b + 48 + 32*(r >> 3) + PLACE_(r), r >> 2 & 1) | (high << U8_SPLAT(4));
    return F8_FROM_U8(q)*(LOAD_HALF(b)*(float)k4_scale(b + 4, r >> 2)) - LOAD_HALF(b + 2)*(float)k4_min(b + 4, r >> 2);
}
DEVICE_FN F8 deq8_q6_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 210);
    const U8 low = NIBBLES(b + 64*HALF_(r) + 32*(QUARTER_(r) & 1) + PLACE_(r), QUARTER_(r) >> 1);
    const float d = LOAD_HALF(b + 208)*(float)(i8_t)BYTE(b + 192 + (r >> 1));
    return (F8_FROM_U8(low | (TWO_BITS(b + 128) << U8_SPLAT(4))) - 32.0f)*d;
}
DEVICE_FN F8 deq8_q8_k(CGLOBAL char *row, int g)
{
    BLOCK(32, 292);
    return F8_FROM_I8(U8_AT(b + 4 + 8*r))*ld_f32(b);
}
DEVICE_FN F8 deq8_iq4_xs(CGLOBAL char *row, int g)
{
    BLOCK(32, 136);
    const int i = r >> 2;
    const int s = (BYTE(b + 4 + (i >> 1)) >> (4*(i & 1)) & 15) | (BYTES2(b + 2) >> (2*i) & 3) << 4;
    return values_iq4nl_of(NIBBLES(b + 8 + 16*i + 8*(r & 1), r >> 1 & 1))*(LOAD_HALF(b)*(float)(s - 32));
}

/* ternary */
DEVICE_FN F8 deq8_tq2_0(CGLOBAL char *row, int g)
{
    BLOCK(32, 66);
    return (F8_FROM_U8(TWO_BITS(b)) - 1.0f)*LOAD_HALF(b + 64);
}
/* five digits of base 3 a byte, as a fraction of 256: 160 elements, 80, and 16 in bytes of four */
DEVICE_FN F8 deq8_tq1_0(CGLOBAL char *row, int g)
{
    BLOCK(32, 54);
    const uint powers[5] = {1, 3, 9, 27, 81};
#define PLACE3_(j) (r < 20 ? PLACE_(r) + j : r < 30 ? 32 + 8*(r & 1) + j : 48 + (j & 3))
#define DIGIT3_(j) (r < 20 ? r >> 2 : r < 30 ? (r - 20) >> 1 : 2*(r - 30) + (j >> 2))
#define E_(j)      ((uchar)((((uint)BYTE(b + PLACE3_(j))*powers[DIGIT3_(j)] & 255u)*3u) >> 8))
    return (F8_FROM_U8(MAKE_U8(E_)) - 1.0f)*LOAD_HALF(b + 52);
#undef E_
}
