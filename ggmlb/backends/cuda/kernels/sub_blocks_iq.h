/* Sub-blocks of IQ1, IQ2 and IQ3: entries of grids (rows_iq.h) as integers. Included by sub_blocks.h. */
enum { SHIFT_iq1_s = 16, SHIFT_iq1_m = 16, SHIFT_iq2_xxs = 0, SHIFT_iq2_xs = 0, SHIFT_iq2_s = 0, SHIFT_iq3_xxs = 0,
       SHIFT_iq3_s = 0 };
#define dp4a_iq1_s   __dp4a
#define dp4a_iq1_m   __dp4a
#define dp4a_iq2_xxs __dp4a
#define dp4a_iq2_xs  __dp4a
#define dp4a_iq2_s   __dp4a
#define dp4a_iq3_xxs __dp4a
#define dp4a_iq3_s   __dp4a

#define EACH_GROUP UNROLL for (int j = 0; j < 4; j++)
#define BYTE_OF(w, n) ((uint)(w)[(n) >> 2] >> 8*((n) & 3) & 255u)
/* a byte of a field, which begins at an even address */
DEVICE_FN uint byte_at(const uint *tile, int field, int i) { return pair_at(tile, field + (i & ~1)) >> 8*(i & 1) & 255u; }
/* negate the bytes whose bits are set; they are at least 1, so that no carry leaves a byte */
DEVICE_FN int negated4(uint w, uint signs)
{
    const uint ones = (uint)spread4(signs);
    return (int)((w ^ 255u*ones) + ones);
}
DEVICE_FN void signed_entry(u64_t entry, uint signs, int *q)
{
    q[0] = negated4((uint)entry, signs);
    q[1] = negated4((uint)(entry >> 32), signs >> 4);
}
/* 8g + 1 or 8g - 1, plus 16, for elements g of -1, 0 and 1 */
DEVICE_FN void shifted_entry(u64_t entry, uint is_negative, int *q)
{
    EACH_WORD(2) {
        const uint w = (uint)(entry >> 32*j), above = ((w ^ 0x80808080u) + 0x01010101u) & 0x03030303u;   /* g + 1 */
        q[j] = (int)(8u*above + (is_negative ? 0x07070707u : 0x09090909u));
    }
}

QUANTS(iq2_xxs)
{
    int w[2];
    words_at<2>(tile, at + QS_iq2_xxs + 8*i, w);
    EACH_GROUP signed_entry(grid_iq2_xxs[BYTE_OF(w, j)], even_signs((uint)w[1] >> 7*j), q + 2*j);
}
QUANTS(iq2_xs)
{
    EACH_GROUP {
        const uint code = pair_at(tile, at + QS_iq2_xs + 8*i + 2*j);
        signed_entry(grid_iq2_xs[code & 511u], even_signs(code >> 9), q + 2*j);
    }
}
QUANTS(iq2_s)
{
    int w[1], signs[1];
    words_at<1>(tile, at + QS_iq2_s + 4*i, w);
    words_at<1>(tile, at + SIGNS_iq2_s + 4*i, signs);
    const uint high = byte_at(tile, at + QH_iq2_s, i);
    EACH_GROUP signed_entry(grid_iq2_s[BYTE_OF(w, j) | (high >> 2*j & 3u) << 8], BYTE_OF(signs, j), q + 2*j);
}
QUANTS(iq3_xxs)
{
    int w[2], signs[1];
    words_at<2>(tile, at + QS_iq3_xxs + 8*i, w);
    words_at<1>(tile, at + SIGNS_iq3_xxs + 4*i, signs);
    EACH_WORD(8) q[j] = negated4(grid_iq3_xxs[BYTE_OF(w, j)], even_signs((uint)signs[0] >> 7*(j >> 1)) >> 4*(j & 1));
}
QUANTS(iq3_s)
{
    int w[2], signs[1];
    words_at<2>(tile, at + QS_iq3_s + 8*i, w);
    words_at<1>(tile, at + SIGNS_iq3_s + 4*i, signs);
    const uint high = byte_at(tile, at + QH_iq3_s, i);
    EACH_WORD(8) q[j] = negated4(grid_iq3_s[BYTE_OF(w, j) | (high >> j & 1u) << 8], (uint)signs[0] >> 4*j);
}
QUANTS(iq1_s)
{
    int w[1];
    words_at<1>(tile, at + QS_iq1_s + 4*i, w);
    const uint high = pair_at(tile, at + QH_iq1_s + 2*i);
    EACH_GROUP shifted_entry(grid_iq1[BYTE_OF(w, j) | (high >> 3*j & 7u) << 8], high >> 15, q + 2*j);
}
QUANTS(iq1_m)
{
    int w[1];
    words_at<1>(tile, at + QS_iq1_m + 4*i, w);
    const uint high = pair_at(tile, at + QH_iq1_m + 2*i);
    EACH_GROUP shifted_entry(grid_iq1[BYTE_OF(w, j) | (high >> 4*j & 7u) << 8], high >> (4*j + 3) & 1u, q + 2*j);
}

/* odd numbers, 2 code + 1, times a power of two */
#define ODD_(code) (2*(int)(code) + 1)
SCALES(iq2_xxs)
{
    d[0] = half_at(tile, at + D_iq2_xxs)*0.125f;
    scale[0] = scale[1] = ODD_(pair_at(tile, at + QS_iq2_xxs + 8*i + 6) >> 12);
}
SCALES(iq2_xs)
{
    d[0] = half_at(tile, at + D_iq2_xs)*0.125f;
    EACH_HALF scale[h] = ODD_(byte_at(tile, at + SCALES_iq2_xs, i) >> 4*h & 15u);
}
SCALES(iq2_s)
{
    d[0] = half_at(tile, at + D_iq2_s)*0.125f;
    EACH_HALF scale[h] = ODD_(byte_at(tile, at + SCALES_iq2_s, i) >> 4*h & 15u);
}
SCALES(iq3_xxs)
{
    d[0] = half_at(tile, at + D_iq3_xxs)*0.25f;
    scale[0] = scale[1] = ODD_(pair_at(tile, at + SIGNS_iq3_xxs + 4*i + 2) >> 12);
}
SCALES(iq3_s)
{
    d[0] = half_at(tile, at + D_iq3_s);
    scale[0] = scale[1] = ODD_(pair_at(tile, at + SCALES_iq3_s + 2*(i >> 2)) >> 4*(i & 3) & 15u);
}
SCALES(iq1_s)
{
    d[0] = half_at(tile, at + D_iq1_s)*0.125f;
    scale[0] = scale[1] = ODD_(pair_at(tile, at + QH_iq1_s + 2*i) >> 12 & 7u);
}
SCALES(iq1_m)
{
    uint bits = 0;
    EACH_GROUP bits |= (pair_at(tile, at + SCALES_iq1_m + 2*j) >> 12) << 4*j;
    d[0] = half_to_float_((ushort)bits)*0.125f;
    EACH_HALF scale[h] = ODD_(pair_at(tile, at + SCALES_iq1_m + 2*(i >> 1)) >> (6*(i & 1) + 3*h) & 7u);
}
