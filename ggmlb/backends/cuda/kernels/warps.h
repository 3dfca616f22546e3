/* Rows of a that the warps of a group share: SPLIT warps have ROWS of them, and each takes its part of the columns. */
#define WARP (LOCAL_ID/32)
#define LANE (LOCAL_ID & 31)
#define SETS (WG/32/SPLIT)                                   /* of rows in a group */
#define FIRST_ROW ((GROUP_ID(0)*SETS + WARP/SPLIT)*ROWS)

/* The matrices of b and d that a group has, and the row m of x, the weights, that they meet. With ONE_MATRIX there is nothing to
   divide, which is a good part of what a group does before its first load. */
#define MATRIX(ne2) const int i2 = ONE_MATRIX ? 0 : GROUP_ID(2) % (ne2), i3 = ONE_MATRIX ? 0 : GROUP_ID(2)/(ne2);
#define ROW_OF(x, m) ROW(x, MIN_(m, x##_ne1 - 1), ONE_MATRIX ? 0 : i2/r2, ONE_MATRIX ? 0 : i3/r3)

#define SUMS (ROWS*COLUMNS)
/* Add up what all threads have; thread i of the first of the warps that share rows gets sum i of row i/COLUMNS. For each
   bit of i, threads send the sums of the other half and keep theirs. partial: shared memory for all sums. */
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
/* write the sum that the thread has, if any, of row r and column c */
#define WRITE_SUMS(write) \
    if (WARP % SPLIT == 0) { \
        const int r = LANE/COLUMNS, c = LANE % COLUMNS; \
        if (r < ROWS && r < n_rows && c < n_columns) write; \
    }

/* With ADDED, a bias is added, a row or a whole matrix; with GLU, its name, the sums are those of a gated unit: v is
   activated, and w, the product with g, is the gate's other half. */
#ifdef ADDED
#define PLUS(bias, v) ((v) + LD(bias, m + r, n + c, i2, i3))
#else
#define PLUS(bias, v) (v)
#endif
#ifdef GLU
#include "activations.h"
#define IF_GLU(...) __VA_ARGS__
#define RESULT GLU(PLUS(bias, v), PLUS(bias_g, w), alpha, limit)
#else
#define IF_GLU(...)
#define RESULT PLUS(bias, v)
#endif
/* what the warps share for one product may be written for the next */
#define NEXT_PRODUCT if (SPLIT > 1) __syncthreads();
