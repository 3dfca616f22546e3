/* Tensors as kernel arguments, loops over them, and loads and stores of plain element types.

   IN(x) and OUT(x) declare a kernel argument: a buffer, a byte offset, extents and byte strides, in ggml's order.
   With PACKED_ARGS, all arguments but the buffers are members of the struct args_, because an OpenCL runtime copies each
   argument at every launch; the host declares it and puts UNPACK(x) for each tensor at the start of the kernel body.
   For each tensor the host defines x_T, its type, and x_STEP, the stride of dimension 0: a constant where known, else
   x_nb0; 0 where a row is one element repeated. */
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#ifdef PACKED_ARGS
typedef struct { i64_t off; int ne[4]; i64_t nb[4]; } tensor_t_;
#define TENSOR_(x)
#define NE_(x, i) x##_ne##i = args_.x.ne[i]
#define NB_(x, i) x##_nb##i = args_.x.nb[i]
#define UNPACK(x) \
    const int NE_(x, 0), NE_(x, 1), NE_(x, 2), NE_(x, 3); \
    const i64_t x##_off = args_.x.off, NB_(x, 0), NB_(x, 1), NB_(x, 2), NB_(x, 3);
#else
#define TENSOR_(x) , i64_t x##_off, int x##_ne0, int x##_ne1, int x##_ne2, int x##_ne3, \
    i64_t x##_nb0, i64_t x##_nb1, i64_t x##_nb2, i64_t x##_nb3
#endif
#define IN(x)  CGLOBAL char *x##_buf TENSOR_(x)
#define OUT(x) GLOBAL char *x##_buf TENSOR_(x)

#define ROW(x, i1, i2, i3) \
    (x##_buf + x##_off + (i64_t)(i1)*x##_nb1 + (i64_t)(i2)*x##_nb2 + (i64_t)(i3)*x##_nb3)
#define AT(x, i0, i1, i2, i3) (ROW(x, i1, i2, i3) + (i64_t)(i0)*x##_STEP)
#define LD_AT(x, p)    CAT(ld_, x##_T)(p)
#define ST_AT(x, p, v) CAT(st_, x##_T)((p), (v))
#define LD_ROW(x, row, i)    LD_AT(x, (row) + (i64_t)(i)*x##_STEP)
#define ST_ROW(x, row, i, v) ST_AT(x, (row) + (i64_t)(i)*x##_STEP, v)
#define LD(x, i0, i1, i2, i3)    LD_AT(x, AT(x, i0, i1, i2, i3))
#define ST(x, i0, i1, i2, i3, v) ST_AT(x, AT(x, i0, i1, i2, i3), v)

/* Loop over the rows of x (i1, i2, i3), a grid-stride loop. LANES work-items share a row; with fewer than WG, a group
   has several rows at a time, and active_ is 0 for those past the end. Divisions cost as much as a short row: most are skipped. */
#define N_ROWS_(x) (x##_ne1*x##_ne2*x##_ne3)
#define ROWS_PER_GROUP_ (WG/LANES)
#define ROW_OF_GROUP_ (LANES == WG ? 0 : LOCAL_ID/LANES)
#define LANE_ (LANES == WG ? LOCAL_ID : LOCAL_ID % LANES)
#define IS_FIRST_LANE (LANE_ == 0 && (LANES == WG || active_))
#define QUOTIENT_(a, b) ((int)((uint)(a)/(uint)(b)))
#define INDICES_(x, r) \
    q_ = x##_ne2*x##_ne3 == 1 ? 0 : QUOTIENT_(r, x##_ne1), i1 = (r) - q_*x##_ne1, \
    i3 = x##_ne3 == 1 ? 0 : QUOTIENT_(q_, x##_ne2), i2 = q_ - i3*x##_ne2, once_ = 1; once_; once_ = 0
#if WG == 1
#define EACH_ROW(x) \
    for (int per_ = (N_ROWS_(x) + NUM_GROUPS(0) - 1)/NUM_GROUPS(0), r_ = GROUP_ID(0)*per_, \
             end_ = r_ + per_ < N_ROWS_(x) ? r_ + per_ : N_ROWS_(x); r_ < end_; r_++) \
        for (int active_ = 1, INDICES_(x, r_))
#else
#define EACH_ROW(x) \
    for (int first_ = 0, r0_ = GROUP_ID(0)*ROWS_PER_GROUP_; r0_ < N_ROWS_(x); r0_ += NUM_GROUPS(0)*ROWS_PER_GROUP_) \
        for (int row_ = r0_ + ROW_OF_GROUP_, active_ = row_ < N_ROWS_(x), r_ = active_ ? row_ : r0_, INDICES_(x, r_))
#endif

/* Elements of a row over its work-items, in n iterations. With PER_LANE (the maximum of elements per work-item), a row is read
   once and written once, and held in registers between: REGS declares them, LOAD_ROW loads, STORE_ROW stores; VALUE and
   SET_VALUE access element i. All loads come before all stores, and are vectors of VEC elements (16 bytes), which the host
   found aligned. FULL_ITERS: iterations without a bounds check. Without PER_LANE, VALUE and SET_VALUE access memory directly. */
#ifdef PER_LANE
#define IN_CHUNKS_(i, n) (chunk < FULL_ITERS/VEC || (i) < (n))
#define CHUNKS_(i, condition) \
    UNROLL for (int chunk = 0; chunk < PER_LANE/VEC; chunk++) \
        for (int i = first_ + (chunk*LANES + LANE_)*VEC, once_ = condition; once_; once_ = 0)
#if LANES == WG
#define IS_ACTIVE_(i, n) IN_CHUNKS_(i, n)
#else
#define IS_ACTIVE_(i, n) (active_ && IN_CHUNKS_(i, n))
#endif
#define EACH_CHUNK_(i, n) CHUNKS_(i, IS_ACTIVE_(i, n))
#define EACH_LANE(i, n) CHUNKS_(of_chunk_, IS_ACTIVE_(of_chunk_, n)) \
    UNROLL for (int k_ = chunk*VEC, i = of_chunk_; k_ < (chunk + 1)*VEC; k_++, i++)
#define REGS(x) CAT(value_, x##_T) x##_v[PER_LANE];
#define LOAD_ROW_AT(x, row, i, n, place) REGS(x) EACH_CHUNK_(i, n) LOAD_CHUNK_(x, row, place)
#define LOAD_ROW(x, row, n) LOAD_ROW_AT(x, row, i, n, i)
#define STORE_ROW(x, row, n) EACH_CHUNK_(i, n) STORE_CHUNK_(x, row, i)
#define VALUE(x, row, i)    x##_v[k_]
#define SET_VALUE(x, row, i, v) x##_v[k_] = (v)
#define EACH_OF_VEC_(expr) UNROLL for (int j_ = 0; j_ < VEC; j_++) { expr; }
#if VEC == 1
#define LOAD_CHUNK_(x, row, i) x##_v[chunk] = LD_ROW(x, row, i);
#define STORE_CHUNK_(x, row, i) ST_ROW(x, row, i, x##_v[chunk]);
#else
#define WORDS_(x) (VEC*CAT(size_, x##_T)/4)
#define LOAD_CHUNK_(x, row, i) \
    if (x##_STEP == 0) { EACH_OF_VEC_(x##_v[chunk*VEC + j_] = LD_AT(x, row)) } \
    else { \
        uint w_[4]; \
        load_words(w_, (row) + (i64_t)(i)*x##_STEP, WORDS_(x)); \
        EACH_OF_VEC_(x##_v[chunk*VEC + j_] = CAT(of_words_, x##_T)(w_, j_)) \
    }
#define STORE_CHUNK_(x, row, i) { \
        uint w_[4] = {0, 0, 0, 0}; \
        EACH_OF_VEC_(CAT(to_words_, x##_T)(w_, j_, x##_v[chunk*VEC + j_])) \
        store_words((row) + (i64_t)(i)*x##_STEP, w_, WORDS_(x)); \
    }
#endif
#else
#define EACH_LANE(i, n) VECTORIZE for (int i = LANE_; i < (n); i += LANES)
#define REGS(x)
#define LOAD_ROW_AT(x, row, i, n, place)
#define LOAD_ROW(x, row, n)
#define STORE_ROW(x, row, n)
#define VALUE(x, row, i)   LD_ROW(x, row, i)
#define SET_VALUE(x, row, i, v) ST_ROW(x, row, i, v)
#endif

/* loop over the elements of x (i0 to i3), grid-stride; with WG 1, over whole rows */
#if WG == 1
#define EACH_ELEMENT(x) EACH_ROW(x) EACH_LANE(i0, x##_ne0)
#else
#define EACH_ELEMENT(x) \
    for (uint n_ = (uint)x##_ne0*(uint)N_ROWS_(x), e_ = (uint)GROUP_ID(0)*WG + (uint)LOCAL_ID; e_ < n_; \
         e_ += (uint)NUM_GROUPS(0)*WG) \
        for (int r_ = N_ROWS_(x) == 1 ? 0 : (int)(e_/(uint)x##_ne0), i0 = (int)(e_ - (uint)r_*(uint)x##_ne0), \
                 INDICES_(x, r_))
#endif

/* d(i) = value for each element, an expression of i0 to i3 and of what `loads` has loaded. If PER_LANE is defined, LANES
   work-items share a segment of a row, PER_LANE elements each, so that i1 to i3 are computed once per segment. */
#define ALONG(x)      VALUE(x, ROW(x, i1, i2, i3), i0)
#define LOAD_ALONG(x) LOAD_ROW(x, ROW(x, i1, i2, i3), d_ne0)
#define MAP_ELEMENTS(d, loads, value) MAP_ROWS(d, d, ROW(d, i1, i2, i3), loads, value)
#ifdef PER_LANE
#define EACH_SEGMENT(x) \
    for (int active_ = 1, n_segments_ = (x##_ne0 + PER_LANE*LANES - 1)/(PER_LANE*LANES), \
             s_ = GROUP_ID(0)*ROWS_PER_GROUP_ + ROW_OF_GROUP_; s_ < n_segments_*N_ROWS_(x); \
         s_ += NUM_GROUPS(0)*ROWS_PER_GROUP_) \
        for (int r_ = N_ROWS_(x) == 1 ? 0 : n_segments_ == 1 ? s_ : QUOTIENT_(s_, n_segments_), \
                 first_ = (s_ - r_*n_segments_)*(PER_LANE*LANES), INDICES_(x, r_))
#define MAP_ROWS(x, d, to, loads, value) EACH_SEGMENT(x) { MAP_SEGMENT(x, d, to, loads, value) }
#define MAP_SEGMENT(x, d, to, loads, value) \
    GLOBAL char *to_ = to; \
    loads \
    REGS(d) \
    EACH_LANE(i0, x##_ne0) SET_VALUE(d, to_, i0, value); \
    STORE_ROW(d, to_, x##_ne0)
#else
#define MAP_ROWS(x, d, to, loads, value) EACH_ELEMENT(x) ST_ROW(d, to, i0, value);
#endif

/* Whether row index i, read from a tensor, is in 0..n-1. If not, and it is the stream's first, it is recorded in bad for the
   host (bad_index.py): a flag, the index, and the number of the step (the offset of bad). */
#define IS_ROW(i, n, bad) is_row_((i), (n), bad##_buf, bad##_off)
DEVICE_FN int is_row_(i64_t i, int n, GLOBAL char *record, i64_t step)
{
    if (i >= 0 && i < n) return 1;
    if (IS_FIRST_TO_SET(record)) {
        ((GLOBAL i64_t *)record)[1] = i;
        ((GLOBAL i64_t *)record)[2] = step;
    }
    return 0;
}

#define MINUS_INFINITY AS_FLOAT(0xff800000u)
/* map floats to integers of the same order: maxima of integers are vectorised, those of floats are not */
#define ORDER_KEY(f)      ((int)AS_UINT(f) ^ ((int)AS_UINT(f) >> 31 & 0x7fffffff))
#define FROM_ORDER_KEY(k) AS_FLOAT((uint)((k) ^ ((k) >> 31 & 0x7fffffff)))

DEVICE_FN float ld_f32(CGLOBAL char *p)  { return *(CGLOBAL float *)p; }
DEVICE_FN float ld_f16(CGLOBAL char *p)  { return LOAD_HALF(p); }
DEVICE_FN float ld_bf16(CGLOBAL char *p) { return AS_FLOAT((uint)*(CGLOBAL ushort *)p << 16); }
DEVICE_FN int   ld_i8(CGLOBAL char *p)   { return *(CGLOBAL i8_t *)p; }
DEVICE_FN int   ld_i16(CGLOBAL char *p)  { return *(CGLOBAL short *)p; }
DEVICE_FN int   ld_i32(CGLOBAL char *p)  { return *(CGLOBAL int *)p; }
DEVICE_FN i64_t ld_i64(CGLOBAL char *p)  { return *(CGLOBAL i64_t *)p; }

DEVICE_FN ushort bf16_bits(float v)      /* round to nearest even; NaN stays NaN */
{
    const uint u = AS_UINT(v);
    return (ushort)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 64u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
DEVICE_FN void st_f32(GLOBAL char *p, float v)  { *(GLOBAL float *)p = v; }
DEVICE_FN void st_f16(GLOBAL char *p, float v)  { STORE_HALF(p, v); }
DEVICE_FN void st_bf16(GLOBAL char *p, float v) { *(GLOBAL ushort *)p = bf16_bits(v); }
DEVICE_FN void st_i8(GLOBAL char *p, int v)     { *(GLOBAL i8_t *)p = (i8_t)v; }
DEVICE_FN void st_i16(GLOBAL char *p, int v)    { *(GLOBAL short *)p = (short)v; }
DEVICE_FN void st_i32(GLOBAL char *p, int v)    { *(GLOBAL int *)p = v; }
DEVICE_FN void st_i64(GLOBAL char *p, i64_t v)  { *(GLOBAL i64_t *)p = v; }

/* value_T: the type that holds an element of T in a register; and packing of elements into 32-bit words */
#define value_f32  float
#define value_f16  float
#define value_bf16 float
#define value_i8   int
#define value_i16  int
#define value_i32  int
#define value_i64  i64_t
#define size_f32   4
#define size_f16   2
#define size_bf16  2
#define size_i32   4
#define HALF_OF_(w, j)       (ushort)((w)[(j)/2] >> 16*((j) % 2))
#define PUT_HALF_(w, j, bits) (w)[(j)/2] |= (uint)(bits) << 16*((j) % 2)
#define of_words_f32(w, j)   AS_FLOAT((w)[j])
#define of_words_f16(w, j)   HALF_FROM_BITS(HALF_OF_(w, j))
#define of_words_bf16(w, j)  AS_FLOAT((uint)HALF_OF_(w, j) << 16)
#define of_words_i32(w, j)   ((int)(w)[j])
#define to_words_f32(w, j, v)  (w)[j] = AS_UINT(v)
#define to_words_f16(w, j, v)  PUT_HALF_(w, j, HALF_BITS(v))
#define to_words_bf16(w, j, v) PUT_HALF_(w, j, bf16_bits(v))
#define to_words_i32(w, j, v)  (w)[j] = (uint)(v)
DEVICE_FN void load_words(uint *w, CGLOBAL char *p, int n)
{
    if (n == 4) { const uint4 v = LOAD_UINT4(p); w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w; }
    else        { const uint2 v = LOAD_UINT2(p); w[0] = v.x; w[1] = v.y; }
}
DEVICE_FN void store_words(GLOBAL char *p, const uint *w, int n)
{
    if (n == 4) { const uint4 v = MAKE_UINT4(w[0], w[1], w[2], w[3]); STORE_UINT4(p, v); }
    else        { const uint2 v = MAKE_UINT2(w[0], w[1]); STORE_UINT2(p, v); }
}
