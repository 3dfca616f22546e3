/* Quantisers from FROM (default f32): quantize_T(row_a, step, row_d, i) writes block i of row_d, as ggml's reference does. */
#ifndef FROM
#define FROM f32
#endif
#define X_(j) CAT(ld_, FROM)(row_a + (32*(i64_t)i + (j))*step)
#define QUANTIZE_(T) \
    DEVICE_FN void quantize_##T(CGLOBAL char *row_a, i64_t step, GLOBAL char *row_d, i64_t i) \
    { GLOBAL char *d = row_d + i*BYTES_##T; quantize_block_##T(row_a, step, d, i); }
#define BLOCK_FN_(T) DEVICE_FN void quantize_block_##T(CGLOBAL char *row_a, i64_t step, GLOBAL char *d, i64_t i)
#define ST_BYTE(p, v) (*(GLOBAL uchar *)(p) = (uchar)(v))

/* The element of largest magnitude, with its sign; the first of equals. NaN compares false and is skipped, as in ggml.
   PRODUCT is used where ggml rounds a product before it adds. */
DEVICE_FN float extreme32(CGLOBAL char *row_a, i64_t step, i64_t i)
{
    float best = 0.0f;
    for (int j = 0; j < 32; j++) { const float x = X_(j); best = FABS(best) < FABS(x) ? x : best; }
    return best;
}
DEVICE_FN float inverse(float d) { return d != 0.0f ? 1.0f/d : 0.0f; }

/* convert x to int as ggml does on x86: 0 if x is not between low and high, or NaN */
DEVICE_FN int whole_in_range(float x, float low, float high) { return x > low && x < high ? (int)x : 0; }

/* quantise to (x - low)*scale + shift, capped at top: nibbles, and the fifth bits of eight elements per byte */
#define LEVEL_(j) quantum(X_(j), low, scale, shift, top)
DEVICE_FN int quantum(float x, float low, float scale, float shift, int top)
{
    const int q = whole_in_range(PRODUCT(x - low, scale) + shift, -1.0f, 256.0f);
    return q < top ? q : top;
}
#define PACK_FN_(name) DEVICE_FN void name(CGLOBAL char *row_a, i64_t step, i64_t i, float low, float scale, \
                                           float shift, int top, GLOBAL char *to)
PACK_FN_(pack_nibbles)
{
    for (int j = 0; j < 16; j++) ST_BYTE(to + j, (LEVEL_(j) & 15) | (LEVEL_(j + 16) & 15) << 4);
}
PACK_FN_(pack_fifth_bits)
{
    for (int b = 0; b < 4; b++) {
        int bits = 0;
        for (int j = 0; j < 8; j++) bits |= (LEVEL_(8*b + j) >> 4 & 1) << j;
        ST_BYTE(to + b, bits);
    }
}

BLOCK_FN_(q4_0)
{
    const float scale = extreme32(row_a, step, i)/-8.0f;
    st_f16(d + D_q4_0, scale);
    pack_nibbles(row_a, step, i, 0.0f, inverse(scale), 8.5f, 15, d + QS_q4_0);
}
BLOCK_FN_(q5_0)
{
    const float scale = extreme32(row_a, step, i)/-16.0f;
    st_f16(d + D_q5_0, scale);
    pack_fifth_bits(row_a, step, i, 0.0f, inverse(scale), 16.5f, 31, d + QH_q5_0);
    pack_nibbles(row_a, step, i, 0.0f, inverse(scale), 16.5f, 31, d + QS_q5_0);
}
#define MOST_FLOAT_ 3.40282347e38f
/* minimum and scale of 2^bits levels, stored first */
DEVICE_FN float range32(CGLOBAL char *row_a, i64_t step, i64_t i, GLOBAL char *d, float top, float *low)
{
    float least = MOST_FLOAT_, most = -MOST_FLOAT_;
    for (int j = 0; j < 32; j++) { const float x = X_(j); least = x < least ? x : least; most = x > most ? x : most; }
    const float scale = (most - least)/top;
    st_f16(d + D_q4_1, scale);
    st_f16(d + M_q4_1, least);
    *low = least;
    return scale;
}
BLOCK_FN_(q4_1)
{
    float low;
    const float scale = range32(row_a, step, i, d, 15.0f, &low);
    pack_nibbles(row_a, step, i, low, inverse(scale), 0.5f, 15, d + QS_q4_1);
}
BLOCK_FN_(q5_1)
{
    float low;
    const float scale = range32(row_a, step, i, d, 31.0f, &low);
    pack_fifth_bits(row_a, step, i, low, inverse(scale), 0.5f, 31, d + QH_q5_1);
    pack_nibbles(row_a, step, i, low, inverse(scale), 0.5f, 31, d + QS_q5_1);
}
BLOCK_FN_(q8_0)
{
    const float scale = FABS(extreme32(row_a, step, i))/127.0f, up = inverse(scale);
    st_f16(d + D_q8_0, scale);
    for (int j = 0; j < 32; j++) st_i8(d + QS_q8_0 + j, whole_in_range(ROUND(X_(j)*up), -129.0f, 128.0f));
}
/* iq4_nl: codes are the nearest levels (the upper on a tie) under the scale that maps the largest element to the first
   level; the stored scale is the least-squares fit weighted by the squares, summed in order. */
DEVICE_FN int nearest_iq4nl(float x)
{
    int below = 0;
    for (int i = 0; i < 15; i++) below += x < 0.5f*((float)values_iq4nl[i] + (float)values_iq4nl[i + 1]) ? 1 : 0;
    return 15 - below;
}
BLOCK_FN_(iq4_nl)
{
    const float extreme = extreme32(row_a, step, i), up = inverse(extreme/-127.0f);
    float xq = 0.0f, qq = 0.0f;
    for (int j = 0; j < 32; j++) {
        const float x = X_(j), q = (float)values_iq4nl[nearest_iq4nl(x*up)], w = PRODUCT(PRODUCT(x, x), q);
        xq += PRODUCT(w, x);
        qq += PRODUCT(w, q);
    }
    st_f16(d + D_iq4_nl, qq > 0.0f && !(FABS(extreme) < 1e-15f) ? xq/qq : 0.0f);
    for (int j = 0; j < 16; j++) ST_BYTE(d + QS_iq4_nl + j, nearest_iq4nl(X_(j)*up) | nearest_iq4nl(X_(j + 16)*up) << 4);
}
QUANTIZE_(iq4_nl)
QUANTIZE_(q4_0)
QUANTIZE_(q4_1)
QUANTIZE_(q5_0)
QUANTIZE_(q5_1)
QUANTIZE_(q8_0)
