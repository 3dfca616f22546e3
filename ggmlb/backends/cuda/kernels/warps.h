/* Rows of a that the warps of a group share: SPLIT warps have ROWS of them, and each takes its part of the columns. */
#define WARP (LOCAL_ID/32)
#define LANE (LOCAL_ID & 31)
#define SETS (WG/32/SPLIT)                                   /* of rows in a group */
#define FIRST_ROW ((GROUP_ID(0)*SETS + WARP/SPLIT)*ROWS)

/* The matrices of b and d that a group has, and the row m of a that they meet. With ONE_MATRIX there is nothing to
   divide, which is a good part of what a group does before its first load. */
#define MATRIX(ne2) const int i2 = ONE_MATRIX ? 0 : GROUP_ID(2) % (ne2), i3 = ONE_MATRIX ? 0 : GROUP_ID(2)/(ne2);
#define ROW_OF_A(m) ROW(a, MIN_(m, a_ne1 - 1), ONE_MATRIX ? 0 : i2/r2, ONE_MATRIX ? 0 : i3/r3)

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
/* thread i of the warp writes sum i, of row r and column c */
#define WRITE_SUMS(write) \
    if (WARP % SPLIT == 0) { \
        UNROLL for (int i = 0; i < ROWS*COLUMNS; i++) { \
            const int r = i/COLUMNS, c = i % COLUMNS; \
            if (LANE == i && r < n_rows && c < n_columns) write; \
        } \
    }
