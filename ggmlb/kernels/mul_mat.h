/* What the products share. d(m, n) = row m of a . row n of b. a has any type, b a plain one; rows are contiguous.

   a's matrices serve r2*r3 times as many of b: matrix i2 of b meets matrix i2/r2 of a. REST says that rows are
   not a whole number of groups of eight (plain types only). */
#include "tensors.h"
#include "rows_k.h"

#define MATRIX_OF_B const int i2 = GROUP_ID(2) % b_ne2, i3 = GROUP_ID(2)/b_ne2;
#define MIN_(a, b) ((a) < (b) ? (a) : (b))
#ifdef REST
#define REST_OF_DOT(x, y) rest_of_dot((x), (y), a_ne0)
DEVICE_FN float rest_of_dot(CGLOBAL char *x, CGLOBAL char *y, int n)
{
    float sum = 0.0f;
    for (int k = n & ~7; k < n; k++) sum += LD_ROW(a, x, k)*LD_ROW(b, y, k);
    return sum;
}
#else
#define REST_OF_DOT(x, y) 0.0f
#endif
