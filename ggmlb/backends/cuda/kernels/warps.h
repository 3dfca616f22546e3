/* Work split of matrix-vector kernels: SPLIT warps of a block share ROWS rows of a, each a part of the columns. */
#define WARP (LOCAL_ID/32)
#define LANE (LOCAL_ID & 31)
#define SETS (WG/32/SPLIT)                                   /* number of sets (ROWS rows of a) of a block */
#define FIRST_ROW ((GROUP_ID(0)*SETS + WARP/SPLIT)*ROWS)

/* The batch indices i2, i3 of this block in d, and row m of x, the weights, for them. With ONE_MATRIX no division is needed,
   which would be a large part of the time before the first load. */
#define MATRIX(ne2) const int i2 = ONE_MATRIX ? 0 : GROUP_ID(2) % (ne2), i3 = ONE_MATRIX ? 0 : GROUP_ID(2)/(ne2);
#define ROW_OF(x, m) ROW(x, MIN_(m, x##_ne1 - 1), ONE_MATRIX ? 0 : i2/r2, ONE_MATRIX ? 0 : i3/r3)

#ifdef SPLIT
#define SUMS (ROWS*COLUMNS)
/* Reduce the sums over all threads; thread i of the first warp of a set gets sum i (row i/COLUMNS). For each bit of i,
   threads exchange halves of their sums and keep the other half. partial: shared memory for the sums of all warps. */
DEVICE_FN float share_sums(float *sum, float *partial)
{
    UNROLL
    for (int n = SUMS/2; n > 0; n >>= 1) {
        const bool upper = LANE & n;
        UNROLL
        for (int i = 0; i < n; i++)
            sum[i] = (upper ? sum[i + n] : sum[i]) + __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + n], n);
    }
    float x = sum[0];
    UNROLL for (int o = SUMS; o < 32; o <<= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    if (SPLIT > 1) {
        if (LANE < SUMS) partial[WARP*SUMS + LANE] = x;
        __syncthreads();
        if (WARP % SPLIT == 0 && LANE < SUMS) for (int w = 1; w < SPLIT; w++) x += partial[(WARP + w)*SUMS + LANE];
    }
    return x;
}
#endif
/* run the statement `write` in threads that have a sum: that of row r of the set and column c */
#define WRITE_SUMS(write) \
    if (WARP % SPLIT == 0) { \
        const int r = LANE/COLUMNS, c = LANE % COLUMNS; \
        if (r < ROWS && r < n_rows && c < n_columns) { write; } \
    }

/* Epilogue. ADDED: a bias is added, one row or a whole matrix. GLU (its name): v, the product with a, is activated; u, the
   product with g, is the gate's other half. */
#ifdef ADDED
#define PLUS_AT(bias, v, i1, i2, i3) ((v) + LD(bias, m + r, i1, i2, i3))
#else
#define PLUS_AT(bias, v, i1, i2, i3) (v)
#endif
#define PLUS(bias, v) PLUS_AT(bias, v, n + c, i2, i3)
#define RESULT RESULT_AT(n + c, i2, i3)
#define RESULT_OF(expert) RESULT_AT(expert, 0, 0)  /* with experts, a bias has a row for each */
/* of several matrices, write the product with the first if is_0, with the second if is_1, or with the third */
#define WRITE_TO_ONE(is_0, is_1) \
    if (is_0) ST(d, m + r, n + c, 0, 0, PLUS_AT(bias, v, n + c, 0, 0)); \
    else if (is_1) ST(d1, m + r, n + c, 0, 0, PLUS_AT(bias1, v, n + c, 0, 0)); \
    else ST(d2, m + r, n + c, 0, 0, PLUS_AT(bias2, v, n + c, 0, 0));
#ifdef GLU
#include "activations.h"
#define IF_GLU(...) __VA_ARGS__
#define RESULT_AT(i1, i2, i3) GLU(PLUS_AT(bias, v, i1, i2, i3), PLUS_AT(bias_g, u, i1, i2, i3), alpha, limit)
#else
#define IF_GLU(...)
#define RESULT_AT(i1, i2, i3) PLUS_AT(bias, v, i1, i2, i3)
#endif
/* barrier before shared memory is reused for the next product */
#define NEXT_PRODUCT if (SPLIT > 1) __syncthreads();
