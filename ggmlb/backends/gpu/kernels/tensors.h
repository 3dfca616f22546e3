/* Tensors as kernel arguments, loops over them, and plain element types.

   A kernel takes IN(x) and OUT(x): a buffer, the byte offset in it, extents and byte strides, as ggml has them.
   With PACKED_ARGS, all arguments but the buffers are members of args_: an OpenCL runtime copies each argument
   for every launch. The host declares it, and puts UNPACK(x) for each tensor at the start of the kernel's body.
   For each, the host defines x_T, the type's name, and x_STEP, the stride of dimension 0: a number where it is
   known, x_nb0 otherwise, 0 where the row is one element repeated. */
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

/* the rows of x, dealt out to the groups: i1, i2, i3. LANES work-items share one; where these are not the whole group, it
   has several at a time, of which the last ones may not be there (here_). Divisions cost as much as a row: most need none. */
#define N_ROWS_(x) (x##_ne1*x##_ne2*x##_ne3)
#define ROWS_AT_ONCE_ (WG/LANES)
#define ROW_OF_GROUP_ (LANES == WG ? 0 : LOCAL_ID/LANES)
#define LANE_ (LANES == WG ? LOCAL_ID : LOCAL_ID % LANES)
#define IS_FIRST_LANE (LANE_ == 0 && (LANES == WG || here_))
#define QUOTIENT_(a, b) ((int)((uint)(a)/(uint)(b)))
#define INDICES_(x, r) \
    q_ = x##_ne2*x##_ne3 == 1 ? 0 : QUOTIENT_(r, x##_ne1), i1 = (r) - q_*x##_ne1, \
    i3 = x##_ne3 == 1 ? 0 : QUOTIENT_(q_, x##_ne2), i2 = q_ - i3*x##_ne2, once_ = 1; once_; once_ = 0
#if WG == 1
#define EACH_ROW(x) \
    for (int per_ = (N_ROWS_(x) + NUM_GROUPS(0) - 1)/NUM_GROUPS(0), r_ = GROUP_ID(0)*per_, \
             end_ = r_ + per_ < N_ROWS_(x) ? r_ + per_ : N_ROWS_(x); r_ < end_; r_++) \
        for (int here_ = 1, INDICES_(x, r_))
#else
#define EACH_ROW(x) \
    for (int first_ = 0, r0_ = GROUP_ID(0)*ROWS_AT_ONCE_; r0_ < N_ROWS_(x); r0_ += NUM_GROUPS(0)*ROWS_AT_ONCE_) \
        for (int mine_ = r0_ + ROW_OF_GROUP_, here_ = mine_ < N_ROWS_(x), r_ = here_ ? mine_ : r0_, INDICES_(x, r_))
#endif

/* The work-items of a row share n rounds. With PER, none has more than that many: then a row is read once and written
   once, and lies in registers between. TAKE reads what x has of it, ROOM makes room, and GIVE writes; VALUE is what x has
   in round i, and SET_VALUE changes it. Loads come before all stores, which they may not overtake, and are of 16 bytes: VEC
   neighbours at once, which the host found aligned. Without PER, VALUE and SET_VALUE are x's memory. SURE: so many
   rounds have all of them. */
#ifdef PER
#define HAS_PIECE_(i, n) (piece < SURE/VEC || (i) < (n))
#define PIECES_(i, condition) \
    UNROLL for (int piece = 0; piece < PER/VEC; piece++) \
        for (int i = first_ + (piece*LANES + LANE_)*VEC, once_ = condition; once_; once_ = 0)
#if LANES == WG
#define IS_MINE_(i, n) HAS_PIECE_(i, n)
#else
#define IS_MINE_(i, n) (here_ && HAS_PIECE_(i, n))
#endif
#define EACH_PIECE_(i, n) PIECES_(i, IS_MINE_(i, n))
#define EACH_LANE(i, n) PIECES_(of_piece_, IS_MINE_(of_piece_, n)) \
    UNROLL for (int k_ = piece*VEC, i = of_piece_; k_ < (piece + 1)*VEC; k_++, i++)
#define ROOM(x) CAT(value_, x##_T) x##_v[PER];
#define TAKE_AT(x, row, i, n, place) ROOM(x) EACH_PIECE_(i, n) TAKE_PIECE(x, row, place)
#define TAKE(x, row, n) TAKE_AT(x, row, i, n, i)
#define GIVE(x, row, n) EACH_PIECE_(i, n) GIVE_PIECE(x, row, i)
#define VALUE(x, row, i)    x##_v[k_]
#define SET_VALUE(x, row, i, v) x##_v[k_] = (v)
#define EACH_OF_VEC_(expr) UNROLL for (int j_ = 0; j_ < VEC; j_++) { expr; }
#if VEC == 1
#define TAKE_PIECE(x, row, i) x##_v[piece] = LD_ROW(x, row, i);
#define GIVE_PIECE(x, row, i) ST_ROW(x, row, i, x##_v[piece]);
#else
#define WORDS_(x) (VEC*CAT(size_, x##_T)/4)
#define TAKE_PIECE(x, row, i) \
    if (x##_STEP == 0) { EACH_OF_VEC_(x##_v[piece*VEC + j_] = LD_AT(x, row)) } \
    else { \
        uint w_[4]; \
        load_words(w_, (row) + (i64_t)(i)*x##_STEP, WORDS_(x)); \
        EACH_OF_VEC_(x##_v[piece*VEC + j_] = CAT(of_words_, x##_T)(w_, j_)) \
    }
#define GIVE_PIECE(x, row, i) { \
        uint w_[4] = {0, 0, 0, 0}; \
        EACH_OF_VEC_(CAT(to_words_, x##_T)(w_, j_, x##_v[piece*VEC + j_])) \
        store_words((row) + (i64_t)(i)*x##_STEP, w_, WORDS_(x)); \
    }
#endif
#else
#define EACH_LANE(i, n) VECTORIZE for (int i = LANE_; i < (n); i += LANES)
#define ROOM(x)
#define TAKE_AT(x, row, i, n, place)
#define TAKE(x, row, n)
#define GIVE(x, row, n)
#define VALUE(x, row, i)   LD_ROW(x, row, i)
#define SET_VALUE(x, row, i, v) ST_ROW(x, row, i, v)
#endif

/* the elements of x, dealt out to all work-items: i0 to i3; a group has whole rows where WG is 1 */
#if WG == 1
#define EACH_ELEMENT(x) EACH_ROW(x) EACH_LANE(i0, x##_ne0)
#else
#define EACH_ELEMENT(x) \
    for (uint n_ = (uint)x##_ne0*(uint)N_ROWS_(x), e_ = (uint)GROUP_ID(0)*WG + (uint)LOCAL_ID; e_ < n_; \
         e_ += (uint)NUM_GROUPS(0)*WG) \
        for (int r_ = N_ROWS_(x) == 1 ? 0 : (int)(e_/(uint)x##_ne0), i0 = (int)(e_ - (uint)r_*(uint)x##_ne0), \
                 INDICES_(x, r_))
#endif

/* Each element of d, at the same place as one of x, becomes an expression: of i0 to i3, and of what was taken by then.
   With PER, LANES work-items have a stretch of a row, PER elements for each, which costs no division for each. */
#define ALONG(x)      VALUE(x, ROW(x, i1, i2, i3), i0)
#define TAKE_ALONG(x) TAKE(x, ROW(x, i1, i2, i3), d_ne0)
#define MAP_ELEMENTS(d, takes, value) MAP_ROWS(d, d, ROW(d, i1, i2, i3), takes, value)
#ifdef PER
#define EACH_STRETCH(x) \
    for (int here_ = 1, n_stretches_ = (x##_ne0 + PER*LANES - 1)/(PER*LANES), \
             s_ = GROUP_ID(0)*ROWS_AT_ONCE_ + ROW_OF_GROUP_; s_ < n_stretches_*N_ROWS_(x); \
         s_ += NUM_GROUPS(0)*ROWS_AT_ONCE_) \
        for (int r_ = N_ROWS_(x) == 1 ? 0 : n_stretches_ == 1 ? s_ : QUOTIENT_(s_, n_stretches_), \
                 first_ = (s_ - r_*n_stretches_)*(PER*LANES), INDICES_(x, r_))
#define MAP_ROWS(x, d, to, takes, value) EACH_STRETCH(x) { MAP_STRETCH(x, d, to, takes, value) }
#define MAP_STRETCH(x, d, to, takes, value) \
    GLOBAL char *to_ = to; \
    takes \
    ROOM(d) \
    EACH_LANE(i0, x##_ne0) SET_VALUE(d, to_, i0, value); \
    GIVE(d, to_, x##_ne0)
#else
#define MAP_ROWS(x, d, to, takes, value) EACH_ELEMENT(x) ST_ROW(d, to, i0, value);
#endif

/* Whether a tensor has row i, of n: i is data, which may hold anything. The stream's first one out of range is recorded in
   bad for the host (bad_index.py): that there is one, the row, and the step's number, which is bad's offset. */
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
/* integers in the order of the floats: their maximum is vectorised, that of floats is not */
#define ORDER_KEY(f)      ((int)AS_UINT(f) ^ ((int)AS_UINT(f) >> 31 & 0x7fffffff))
#define FROM_ORDER_KEY(k) AS_FLOAT((uint)((k) ^ ((k) >> 31 & 0x7fffffff)))

DEVICE_FN float ld_f32(CGLOBAL char *p)  { return *(CGLOBAL float *)p; }
DEVICE_FN float ld_f16(CGLOBAL char *p)  { return LOAD_HALF(p); }
DEVICE_FN float ld_bf16(CGLOBAL char *p) { return AS_FLOAT((uint)*(CGLOBAL ushort *)p << 16); }
DEVICE_FN int   ld_i8(CGLOBAL char *p)   { return *(CGLOBAL i8_t *)p; }
DEVICE_FN int   ld_i16(CGLOBAL char *p)  { return *(CGLOBAL short *)p; }
DEVICE_FN int   ld_i32(CGLOBAL char *p)  { return *(CGLOBAL int *)p; }
DEVICE_FN i64_t ld_i64(CGLOBAL char *p)  { return *(CGLOBAL i64_t *)p; }

DEVICE_FN ushort bf16_bits(float v)      /* to nearest, ties to even; a NaN stays one */
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

/* values in registers, and in words of memory that hold several */
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
