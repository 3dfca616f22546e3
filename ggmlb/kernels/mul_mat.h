/* What the products share. d(m, n) = row m of a . row n of b. a has any type, b a plain one; rows are contiguous.

   a's matrices serve r2*r3 times as many of b: matrix i2 of b meets matrix i2/r2 of a. REST says that rows are
   not a whole number of groups of eight (plain types only): the last group is filled up with zeros. */
#include "tensors.h"
#include "rows_k.h"

#define MATRIX_OF_B const int i2 = GROUP_ID(2) % b_ne2, i3 = GROUP_ID(2)/b_ne2;
#define MIN_(a, b) ((a) < (b) ? (a) : (b))

#ifdef REST
#define A_(j) (j < n ? LD_ROW(a, row, j) : 0.0f)
#define B_(j) (j < n ? LD_ROW(b, row, j) : 0.0f)
DEVICE_FN F8 tail8_a(CGLOBAL char *row, int n) { return MAKE_F8(A_); }
DEVICE_FN F8 tail8_b(CGLOBAL char *row, int n) { return MAKE_F8(B_); }
#define TAIL8(x, row) tail8_##x((row) + (i64_t)(a_ne0 & ~7)*x##_STEP, a_ne0 & 7)
#define IF_REST(code) code
#else
#define IF_REST(code)
#endif
