/* Rows read eight elements at a time, whatever their type: deq8_T(row, g) gives elements 8g to 8g+7.

   Quantised blocks are read in ggml's own layout. Groups of eight never cross a block, and in every format their
   bits lie in eight neighbouring bytes, so that the vector operations below are all it takes. */
#define DEQ8(x, row, g) CAT(deq8_, x##_T)((row), (g))
#define U8_AT(p)        LOAD_U8((CGLOBAL uchar *)(p))
#define BYTE(p)         (*(CGLOBAL uchar *)(p))
#define BYTES2(p)       ((uint)BYTE(p) | (uint)BYTE((p) + 1) << 8)
#define BLOCK(groups, size) CGLOBAL char *b = row + (i64_t)((uint)g/(groups))*(size); const int r = (uint)g % (groups)
#define LOW4(q)         ((q) & U8_SPLAT(15))
#define HIGH4(q)        ((q) >> U8_SPLAT(4))
#define NIBBLES(p, high) ((U8_AT(p) >> U8_SPLAT((uchar)(4*(high)))) & U8_SPLAT(15))

DEVICE_FN F8 deq8_f32(CGLOBAL char *row, int g) { return LOAD8((CGLOBAL float *)row + 8*(i64_t)g); }
DEVICE_FN F8 deq8_f16(CGLOBAL char *row, int g)
{
#define E_(j) LOAD_HALF((CGLOBAL ushort *)row + 8*(i64_t)g + j)
    return MAKE_F8(E_);
#undef E_
}
DEVICE_FN F8 deq8_bf16(CGLOBAL char *row, int g)
{
#define E_(j) AS_FLOAT((uint)((CGLOBAL ushort *)row)[8*(i64_t)g + j] << 16)
    return MAKE_F8(E_);
#undef E_
}

/* eight floats to a row of a plain type */
DEVICE_FN void st8_f32(GLOBAL char *row, int g, F8 v) { STORE8((GLOBAL float *)row + 8*(i64_t)g, v); }
#define ST8_(T, size) DEVICE_FN void st8_##T(GLOBAL char *row, int g, F8 v) \
{ \
    GLOBAL char *p = row + 8*(size)*(i64_t)g; \
    st_##T(p, AT8(v, 0)); st_##T(p + (size), AT8(v, 1)); \
    st_##T(p + 2*(size), AT8(v, 2)); st_##T(p + 3*(size), AT8(v, 3)); \
    st_##T(p + 4*(size), AT8(v, 4)); st_##T(p + 5*(size), AT8(v, 5)); \
    st_##T(p + 6*(size), AT8(v, 6)); st_##T(p + 7*(size), AT8(v, 7)); \
}
ST8_(f16, 2)
ST8_(bf16, 2)

/* blocks of 32, two nibbles a byte: the first half of the elements in the low ones */
DEVICE_FN F8 deq8_q4_0(CGLOBAL char *row, int g)
{
    BLOCK(4, 18);
    return (F8_FROM_U8(NIBBLES(b + 2 + 8*(r & 1), r >> 1)) - 8.0f)*LOAD_HALF(b);
}
DEVICE_FN F8 deq8_q4_1(CGLOBAL char *row, int g)
{
    BLOCK(4, 20);
    return F8_FROM_U8(NIBBLES(b + 4 + 8*(r & 1), r >> 1))*LOAD_HALF(b) + LOAD_HALF(b + 2);
}
/* the fifth bits of a group are one byte */
DEVICE_FN U8 spread_bits(uint bits, int shift)
{
#define E_(j) ((uchar)((bits >> j & 1u) << shift))
    return MAKE_U8(E_);
#undef E_
}
DEVICE_FN F8 deq8_q5_0(CGLOBAL char *row, int g)
{
    BLOCK(4, 22);
    const U8 q = NIBBLES(b + 6 + 8*(r & 1), r >> 1) | spread_bits(BYTE(b + 2 + r), 4);
    return (F8_FROM_U8(q) - 16.0f)*LOAD_HALF(b);
}
DEVICE_FN F8 deq8_q5_1(CGLOBAL char *row, int g)
{
    BLOCK(4, 24);
    const U8 q = NIBBLES(b + 8 + 8*(r & 1), r >> 1) | spread_bits(BYTE(b + 4 + r), 4);
    return F8_FROM_U8(q)*LOAD_HALF(b) + LOAD_HALF(b + 2);
}
DEVICE_FN F8 deq8_q8_0(CGLOBAL char *row, int g)
{
    BLOCK(4, 34);
    return F8_FROM_I8(U8_AT(b + 2 + 8*r))*LOAD_HALF(b);
}
DEVICE_FN F8 deq8_q8_1(CGLOBAL char *row, int g)
{
    BLOCK(4, 36);
    return F8_FROM_I8(U8_AT(b + 4 + 8*r))*LOAD_HALF(b);
}
DEVICE_FN F8 deq8_q1_0(CGLOBAL char *row, int g)
{
    BLOCK(16, 18);
    return (F8_FROM_U8(spread_bits(BYTE(b + 2 + r), 1)) - 1.0f)*LOAD_HALF(b);
}

/* nibbles that index a table of values */
CONSTANT float values_iq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
CONSTANT float values_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};   /* doubled */
#define LOOKUP_(name) DEVICE_FN F8 name##_of(U8 q) { return MAKE_F8(name##_at_); }
#define values_iq4nl_at_(j) values_iq4nl[AT8(q, j)]
#define values_e2m1_at_(j)  values_e2m1[AT8(q, j)]
LOOKUP_(values_iq4nl)
LOOKUP_(values_e2m1)

DEVICE_FN F8 deq8_iq4_nl(CGLOBAL char *row, int g)
{
    BLOCK(4, 18);
    return values_iq4nl_of(NIBBLES(b + 2 + 8*(r & 1), r >> 1))*LOAD_HALF(b);
}
DEVICE_FN F8 deq8_mxfp4(CGLOBAL char *row, int g)
{
    BLOCK(4, 17);
    const uint e = BYTE(b);                                     /* half of 2^(e-127) */
    const float d = AS_FLOAT(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    return values_e2m1_of(NIBBLES(b + 1 + 8*(r & 1), r >> 1))*d;
}
DEVICE_FN F8 deq8_nvfp4(CGLOBAL char *row, int g)
{
    BLOCK(8, 36);                                               /* four times 16, each with its e4m3 scale */
    const uint u = BYTE(b + (r >> 1)), e = u >> 3 & 15u, m = u & 7u;
    const float d = u == 0x7fu ? 0.0f : e ? AS_FLOAT((e + 119u) << 23 | m << 20) : (float)m*0x1.0p-10f;
    return values_e2m1_of(NIBBLES(b + 4 + 8*(r >> 1), r & 1))*d;
}
