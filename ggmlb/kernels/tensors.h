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

/* the rows of x, dealt out to the groups: i1, i2, i3 */
#define N_ROWS_(x) (x##_ne1*x##_ne2*x##_ne3)
#define EACH_ROW(x) \
    for (int per_ = (N_ROWS_(x) + NUM_GROUPS(0) - 1)/NUM_GROUPS(0), r_ = GROUP_ID(0)*per_, \
             end_ = r_ + per_ < N_ROWS_(x) ? r_ + per_ : N_ROWS_(x); r_ < end_; r_++) \
        for (int i1 = r_ % x##_ne1, q_ = r_/x##_ne1, i2 = q_ % x##_ne2, i3 = q_/x##_ne2, once_ = 1; once_; once_ = 0)
/* the work-items of a group share n rounds */
#define EACH_LANE(i, n) VECTORIZE for (int i = LOCAL_ID; i < (n); i += WG)

/* the elements of x, dealt out to all work-items: i0 to i3; a group has whole rows where WG is 1 */
#if WG == 1
#define EACH_ELEMENT(x) EACH_ROW(x) EACH_LANE(i0, x##_ne0)
#else
#define EACH_ELEMENT(x) \
    for (uint n_ = (uint)x##_ne0*(uint)N_ROWS_(x), e_ = (uint)GROUP_ID(0)*WG + (uint)LOCAL_ID; e_ < n_; \
         e_ += (uint)NUM_GROUPS(0)*WG) \
        for (int i0 = (int)(e_ % (uint)x##_ne0), r_ = (int)(e_/(uint)x##_ne0), i1 = r_ % x##_ne1, \
                 q_ = r_/x##_ne1, i2 = q_ % x##_ne2, i3 = q_/x##_ne2, once_ = 1; once_; once_ = 0)
#endif

/* each element of d becomes an expression of its i0 to i3. With PER, a group has PER*WG neighbours of a row, which costs
   no division for each, and loads for all of them before it stores the first, as no load may overtake a store. */
#ifdef PER
#define value_f32  float
#define value_f16  float
#define value_bf16 float
#define value_i8   int
#define value_i16  int
#define value_i32  int
#define value_i64  i64_t
#define EACH_OF_PER_(x) \
    UNROLL for (int k_ = 0; k_ < PER; k_++) for (int i0 = first_ + k_*WG, once_ = i0 < x##_ne0; once_; once_ = 0)
#define MAP_ELEMENTS(x, value) { \
    const int chunks_ = (x##_ne0 + PER*WG - 1)/(PER*WG), n_ = chunks_*N_ROWS_(x); \
    for (int c_ = GROUP_ID(0); c_ < n_; c_ += NUM_GROUPS(0)) { \
        const int r_ = c_/chunks_, first_ = c_ % chunks_*(PER*WG) + LOCAL_ID, q_ = r_/x##_ne1; \
        const int i1 = r_ % x##_ne1, i2 = q_ % x##_ne2, i3 = q_/x##_ne2; \
        CAT(value_, x##_T) v_[PER]; \
        EACH_OF_PER_(x) v_[k_] = value; \
        EACH_OF_PER_(x) ST(x, i0, i1, i2, i3, v_[k_]); \
    } }
#else
#define MAP_ELEMENTS(x, value) EACH_ELEMENT(x) ST(x, i0, i1, i2, i3, value);
#endif

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
