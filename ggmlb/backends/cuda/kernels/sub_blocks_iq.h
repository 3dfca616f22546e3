/* Sub-blocks of IQ1, IQ2 and IQ3: entries of grids (rows_iq.h) as integers. Included by sub_blocks.h. */
#define HAS_GRIDS 1
enum { SHIFT_iq1_s = 16, SHIFT_iq1_m = 16, SHIFT_iq2_xxs = 0, SHIFT_iq2_xs = 0, SHIFT_iq2_s = 0, SHIFT_iq3_xxs = 0,
       SHIFT_iq3_s = 0 };
enum { UNSIGNED_iq1_s = 0, UNSIGNED_iq1_m = 0, UNSIGNED_iq2_xxs = 0, UNSIGNED_iq2_xs = 0, UNSIGNED_iq2_s = 0,
       UNSIGNED_iq3_xxs = 0, UNSIGNED_iq3_s = 0 };

/* word j of the result: of half h, the word k; the half's entries of eight bytes are words 0 and 1, then 2 and 3 */
#define H (j/N)
#define K (j % N + first)
#define ENTRY (2*H + (K >> 1))
#define PART (K & 1)
/* with N = 4, PART is a constant, and both words of an entry are one load */
#define WORD_OF(grid, i) (N == 4 ? (uint)((grid)[i] >> 32*PART) : ((const uint *)(grid))[2*(i) + PART])
#define BYTE_OF(w, n) ((uint)(w) >> 8*(n) & 255u)
/* a byte of a field, which begins at an even address */
DEVICE_FN uint byte_at(const uint *tile, int field, int i) { return pair_at(tile, field + (i & ~1)) >> 8*(i & 1) & 255u; }
/* negate the bytes whose bits are set; they are at least 1, so that no carry leaves a byte */
DEVICE_FN int negated4(uint w, uint signs)
{
    const uint ones = (uint)spread4(signs);
    return (int)((w ^ 255u*ones) + ones);
}
/* 8g + 1 or 8g - 1, plus 16, for elements g of -1, 0 and 1 */
DEVICE_FN int shifted4(uint w, uint is_negative)
{
    const uint above = ((w ^ 0x80808080u) + 0x01010101u) & 0x03030303u;   /* g + 1 */
    return (int)(8u*above + (is_negative ? 0x07070707u : 0x09090909u));
}

QUANTS(iq2_xxs)
{
    int w[2];
    words_at<2>(tile, at + QS_iq2_xxs + 8*i, w);
    EACH_WORD(2*N) q[j] = negated4(WORD_OF(grid_iq2_xxs, BYTE_OF(w[0], ENTRY)), even_signs((uint)w[1] >> 7*ENTRY) >> 4*PART);
}
QUANTS(iq2_xs)
{
    EACH_WORD(2*N) {
        const uint code = pair_at(tile, at + QS_iq2_xs + 8*i + 2*ENTRY);
        q[j] = negated4(WORD_OF(grid_iq2_xs, code & 511u), even_signs(code >> 9) >> 4*PART);
    }
}
QUANTS(iq2_s)
{
    int w, signs;
    words_at<1>(tile, at + QS_iq2_s + 4*i, &w);
    words_at<1>(tile, at + SIGNS_iq2_s + 4*i, &signs);
    const uint high = byte_at(tile, at + QH_iq2_s, i);
    EACH_WORD(2*N)
        q[j] = negated4(WORD_OF(grid_iq2_s, BYTE_OF(w, ENTRY) | (high >> 2*ENTRY & 3u) << 8), (uint)signs >> (8*ENTRY + 4*PART));
}
QUANTS(iq3_xxs)
{
    int w[2], signs;
    words_at<2>(tile, at + QS_iq3_xxs + 8*i, w);
    words_at<1>(tile, at + SIGNS_iq3_xxs + 4*i, &signs);
    EACH_WORD(2*N) q[j] = negated4(grid_iq3_xxs[BYTE_OF(w[H], K)], even_signs((uint)signs >> 7*ENTRY) >> 4*PART);
}
QUANTS(iq3_s)
{
    int w[2], signs;
    words_at<2>(tile, at + QS_iq3_s + 8*i, w);
    words_at<1>(tile, at + SIGNS_iq3_s + 4*i, &signs);
    const uint high = byte_at(tile, at + QH_iq3_s, i);
    EACH_WORD(2*N) {
        const int n = 4*H + K;
        q[j] = negated4(grid_iq3_s[BYTE_OF(w[H], K) | (high >> n & 1u) << 8], (uint)signs >> 4*n);
    }
}
QUANTS(iq1_s)
{
    int w;
    words_at<1>(tile, at + QS_iq1_s + 4*i, &w);
    const uint high = pair_at(tile, at + QH_iq1_s + 2*i);
    EACH_WORD(2*N) q[j] = shifted4(WORD_OF(grid_iq1, BYTE_OF(w, ENTRY) | (high >> 3*ENTRY & 7u) << 8), high >> 15);
}
QUANTS(iq1_m)
{
    int w;
    words_at<1>(tile, at + QS_iq1_m + 4*i, &w);
    const uint high = pair_at(tile, at + QH_iq1_m + 2*i);
    EACH_WORD(2*N) {
        const uint nibble = high >> 4*ENTRY;
        q[j] = shifted4(WORD_OF(grid_iq1, BYTE_OF(w, ENTRY) | (nibble & 7u) << 8), nibble >> 3 & 1u);
    }
}
#undef H
#undef K
#undef ENTRY
#undef PART

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
    EACH_WORD(4) bits |= (pair_at(tile, at + SCALES_iq1_m + 2*j) >> 12) << 4*j;
    d[0] = half_to_float_((ushort)bits)*0.125f;
    EACH_HALF scale[h] = ODD_(pair_at(tile, at + SCALES_iq1_m + 2*(i >> 1)) >> (6*(i & 1) + 3*h) & 7u);
}
