/* Rows dequantised eight elements at a time, for any type T: deq8_T(row, g) gives elements 8g to 8g+7.

   Quantised blocks are read in ggml's layout. A group of eight never crosses a block, and its bits are in eight neighbouring
   bytes in every format, so that few vector operations unpack them. For block b and group r within it:

       GROUPS_T, BYTES_T      groups of eight elements and bytes per block; D_T, QS_T, ... byte offsets of its fields (blocks.h)
       SHARE_T                consecutive groups with the same scale and min
       SPAN_T                 consecutive groups with bits at the same positions in a byte, unpacked together
       raw8_T(b, r)           quants: element = quant*scale - min
       scale_T(b, r)          scale
       min_T(b, r)            min, if HAS_MIN_T */
#include "blocks.h"
#define OF_TYPE(name, x) CAT(name##_, x##_T)
#define BLOCK_AT(x, row, g) ((row) + (i64_t)((uint)(g)/OF_TYPE(GROUPS, x))*OF_TYPE(BYTES, x))
#define GROUP_IN(x, g) ((int)((uint)(g) % OF_TYPE(GROUPS, x)))
#define DEQ8(x, row, g) OF_TYPE(deq8, x)((row), (g))

#define TRAITS(T, share, span, has_min) enum { SHARE_##T = share, SPAN_##T = span, HAS_MIN_##T = has_min };
#define RAW8(T)  DEVICE_FN F8 raw8_##T(CGLOBAL char *b, int r)
#define SCALE(T) DEVICE_FN float scale_##T(CGLOBAL char *b, int r)
#define MIN(T)   DEVICE_FN float min_##T(CGLOBAL char *b, int r)
#define NO_MIN(T) MIN(T) { return 0.0f; }
#define DEQ8_FN(T) DEVICE_FN F8 deq8_##T(CGLOBAL char *row, int g) \
{ \
    CGLOBAL char *b = row + (i64_t)((uint)g/GROUPS_##T)*BYTES_##T; \
    const int r = (int)((uint)g % GROUPS_##T); \
    return HAS_MIN_##T ? raw8_##T(b, r)*scale_##T(b, r) - min_##T(b, r) : raw8_##T(b, r)*scale_##T(b, r); \
}
#define U8_AT(p)        LOAD_U8((CGLOBAL uchar *)(p))
#define U8_ALIGNED(p)   LOAD_U8_ALIGNED((CGLOBAL uchar *)(p))   /* the address p is a multiple of 8 */
#define BYTE(p)         (*(CGLOBAL uchar *)(p))
#define BYTES2(p)       ((uint)BYTE(p) | (uint)BYTE((p) + 1) << 8)
#define NIBBLES(p, high) ((U8_AT(p) >> U8_SPLAT((uchar)(4*(high)))) & U8_SPLAT(15))

/* plain types (f32, f16, bf16): eight elements count as a block */
TRAITS(f32, 1, 4, 0)
RAW8(f32) { return LOAD8((CGLOBAL float *)b); }
SCALE(f32) { return 1.0f; }
NO_MIN(f32)
DEQ8_FN(f32)

#define HALF_AT_(j) LOAD_HALF((CGLOBAL ushort *)b + j)
TRAITS(f16, 1, 4, 0)
RAW8(f16) { return MAKE_F8(HALF_AT_); }
SCALE(f16) { return 1.0f; }
NO_MIN(f16)
DEQ8_FN(f16)

#define BF16_AT_(j) AS_FLOAT((uint)((CGLOBAL ushort *)b)[j] << 16)
TRAITS(bf16, 1, 4, 0)
RAW8(bf16) { return MAKE_F8(BF16_AT_); }
SCALE(bf16) { return 1.0f; }
NO_MIN(bf16)
DEQ8_FN(bf16)

/* st8_T(row, g, v): store eight floats as elements 8g to 8g+7 of a row of plain type T */
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
#define HALVES_(p) F8_FROM_U8(NIBBLES((p) + 8*(r & 1), r >> 1))
#define ONE_SCALE_(T) SCALE(T) { return LOAD_HALF(b + D_##T); }
#define ONE_MIN_(T)   MIN(T) { return -LOAD_HALF(b + M_##T); }

TRAITS(q4_0, 4, 4, 0)
RAW8(q4_0) { return HALVES_(b + QS_q4_0) - 8.0f; }
ONE_SCALE_(q4_0)
NO_MIN(q4_0)
DEQ8_FN(q4_0)

TRAITS(q4_1, 4, 4, 1)
RAW8(q4_1) { return HALVES_(b + QS_q4_1); }
ONE_SCALE_(q4_1)
ONE_MIN_(q4_1)
DEQ8_FN(q4_1)

/* the fifth bits of a group are one byte */
TRAITS(q5_0, 4, 4, 0)
RAW8(q5_0) { return HALVES_(b + QS_q5_0) - 16.0f + F8_FROM_BITS(BYTE(b + QH_q5_0 + r))*16.0f; }
ONE_SCALE_(q5_0)
NO_MIN(q5_0)
DEQ8_FN(q5_0)

TRAITS(q5_1, 4, 4, 1)
RAW8(q5_1) { return HALVES_(b + QS_q5_1) + F8_FROM_BITS(BYTE(b + QH_q5_1 + r))*16.0f; }
ONE_SCALE_(q5_1)
ONE_MIN_(q5_1)
DEQ8_FN(q5_1)

TRAITS(q8_0, 4, 4, 0)
RAW8(q8_0) { return F8_FROM_I8(U8_AT(b + QS_q8_0 + 8*r)); }
ONE_SCALE_(q8_0)
NO_MIN(q8_0)
DEQ8_FN(q8_0)

TRAITS(q8_1, 4, 4, 0)
RAW8(q8_1) { return F8_FROM_I8(U8_AT(b + QS_q8_1 + 8*r)); }
ONE_SCALE_(q8_1)
NO_MIN(q8_1)
DEQ8_FN(q8_1)

TRAITS(q1_0, 16, 4, 0)
RAW8(q1_0) { return F8_FROM_BITS(BYTE(b + QS_q1_0 + r))*2.0f - 1.0f; }
ONE_SCALE_(q1_0)
NO_MIN(q1_0)
DEQ8_FN(q1_0)

#define QUARTER_OF_BYTE_(j) (float)(BYTE(b + QS_q2_0 + 2*r + (j)/4) >> (2*((j) & 3)) & 3)
TRAITS(q2_0, 8, 4, 0)
RAW8(q2_0) { return MAKE_F8(QUARTER_OF_BYTE_) - 1.0f; }
ONE_SCALE_(q2_0)
NO_MIN(q2_0)
DEQ8_FN(q2_0)

/* nibbles that index a table of values */
CONSTANT i8_t values_iq4nl[16] = {LEVELS_iq4_nl};
CONSTANT i8_t values_e2m1[16] = {LEVELS_mxfp4};   /* mxfp4, nvfp4: twice the values of the format E2M1 */

TRAITS(iq4_nl, 4, 4, 0)
RAW8(iq4_nl) { return F8_LOOKUP(values_iq4nl, NIBBLES(b + QS_iq4_nl + 8*(r & 1), r >> 1)); }
ONE_SCALE_(iq4_nl)
NO_MIN(iq4_nl)
DEQ8_FN(iq4_nl)

TRAITS(mxfp4, 4, 4, 0)
RAW8(mxfp4) { return F8_LOOKUP(values_e2m1, NIBBLES(b + QS_mxfp4 + 8*(r & 1), r >> 1)); }
SCALE(mxfp4)                                    /* 2^(e-127)/2: halved, as values_e2m1 are doubled */
{
    const uint e = BYTE(b + E_mxfp4);
    return AS_FLOAT(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}
NO_MIN(mxfp4)
DEQ8_FN(mxfp4)

/* four sub-blocks of 16, each with an unsigned E4M3 scale; halved, as the values are doubled */
TRAITS(nvfp4, 2, 4, 0)
RAW8(nvfp4) { return F8_LOOKUP(values_e2m1, NIBBLES(b + QS_nvfp4 + 8*(r >> 1), r & 1)); }
SCALE(nvfp4)
{
    const uint u = BYTE(b + D_nvfp4 + (r >> 1)), e = u >> 3 & 15u, m = u & 7u;
    return u == 0x7fu ? 0.0f : e ? AS_FLOAT((e + 119u) << 23 | m << 20) : (float)m*0.0009765625f;
}
NO_MIN(nvfp4)
DEQ8_FN(nvfp4)

/* Blocks in groups of eight, their scales in front (packed_buffer.py): all bits of eight elements are one aligned load */
enum { GROUPS_q4_0_x8 = 8*GROUPS_q4_0, BYTES_q4_0_x8 = 8*BYTES_q4_0 };
TRAITS(q4_0_x8, 4, 4, 0)
RAW8(q4_0_x8)
{
    const U8 both = U8_ALIGNED(b + 8*QS_q4_0 + 16*(r >> 2) + 8*(r & 1));
    return F8_FROM_U8((both >> U8_SPLAT((uchar)(2*(r & 2)))) & U8_SPLAT(15)) - 8.0f;
}
SCALE(q4_0_x8) { return LOAD_HALF(b + QS_q4_0*(r >> 2)); }
NO_MIN(q4_0_x8)
DEQ8_FN(q4_0_x8)

enum { GROUPS_q8_0_x8 = 8*GROUPS_q8_0, BYTES_q8_0_x8 = 8*BYTES_q8_0 };
TRAITS(q8_0_x8, 4, 4, 0)
RAW8(q8_0_x8) { return F8_FROM_I8(U8_ALIGNED(b + 8*QS_q8_0 + 8*r)); }
SCALE(q8_0_x8) { return LOAD_HALF(b + QS_q8_0*(r >> 2)); }
NO_MIN(q8_0_x8)
DEQ8_FN(q8_0_x8)
