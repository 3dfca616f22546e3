/* Rows of a that the warps of a group share: SPLIT warps have ROWS of them, and each takes its part of the columns. */
#define WARP (LOCAL_ID/32)
#define LANE (LOCAL_ID & 31)
#define SETS (WG/32/SPLIT)                                   /* of rows in a group */
#define FIRST_ROW ((GROUP_ID(0)*SETS + WARP/SPLIT)*ROWS)

/* The matrices of b and d that a group has, and the row m of x, the weights, that they meet. With ONE_MATRIX there is nothing to
   divide, which is a good part of what a group does before its first load. */
#define MATRIX(ne2) const int i2 = ONE_MATRIX ? 0 : GROUP_ID(2) % (ne2), i3 = ONE_MATRIX ? 0 : GROUP_ID(2)/(ne2);
#define ROW_OF(x, m) ROW(x, MIN_(m, x##_ne1 - 1), ONE_MATRIX ? 0 : i2/r2, ONE_MATRIX ? 0 : i3/r3)

/* add up what the threads have, for the first of the warps that share rows; partial: shared memory for all sums */
DEVICE_FN void share_sums(float *sum, float *partial)
{
    UNROLL
    for (int i = 0; i < ROWS*COLUMNS; i++) {
        float x = sum[i];
        WARP_REDUCE_(ADD_)
        sum[i] = x;
    }
    if (SPLIT > 1) {
        if (LANE == 0) UNROLL for (int i = 0; i < ROWS*COLUMNS; i++) partial[WARP*ROWS*COLUMNS + i] = sum[i];
        __syncthreads();
        if (WARP % SPLIT == 0) {
            UNROLL
            for (int i = 0; i < ROWS*COLUMNS; i++)
                for (int w = 1; w < SPLIT; w++) sum[i] += partial[(WARP + w)*ROWS*COLUMNS + i];
        }
    }
}
/* thread i of the warp writes v, its sum, and has w, its gate, of row r and column c */
#define WRITE_SUMS(sum, gate, write) \
    if (WARP % SPLIT == 0) { \
        const int r = LANE/COLUMNS, c = LANE % COLUMNS; \
        float v = 0.0f, w = 0.0f; \
        UNROLL for (int i = 0; i < ROWS*COLUMNS; i++) if (LANE == i) { v = sum[i]; w = gate[i]; } \
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
#define gates sum
#endif
/* what the warps share for one product may be written for the next */
#define NEXT_PRODUCT if (SPLIT > 1) __syncthreads();
