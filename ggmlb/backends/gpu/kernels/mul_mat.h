/* Shared by the matrix products: d(m, n) = row m of a . row n of b. a has any type, b a plain one; rows are contiguous.

   Broadcasting: matrix i2 of b is multiplied by matrix i2/r2 of a (r3 likewise). With REST (plain types only), rows are
   no multiple of eight elements: the last group of eight is padded with zeros. */
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

/* epilogue of ADDED: a bias is added, one row, or a residual as large as d */
#ifdef ADDED
#define IF_ADDED(...) __VA_ARGS__
#else
#define IF_ADDED(...)
#endif

/* Columns of a panel or tile: byte offsets of where each is read and where its products are written, so that columns of
   mul_mat and those routed to an expert look alike. */
#define COLUMN_LISTS(most) LOCAL_ARRAY(i64_t, from, most); LOCAL_ARRAY(i64_t, to, most);
#define LIST_COLUMNS(n0, n) \
    for (int c = LOCAL_ID; c < (n); c += WG) { \
        from[c] = (i64_t)((n0) + c)*b_nb1 + (i64_t)i2*b_nb2 + (i64_t)i3*b_nb3; \
        to[c] = (i64_t)((n0) + c)*d_nb1 + (i64_t)i2*d_nb2 + (i64_t)i3*d_nb3; \
    }

/* Pairs (slot, token) that ids routes to an expert: each work-item counts its own range of pairs. */
#define N_PAIRS (ids_ne0*ids_ne1)
#define EACH_PAIR(p, expert) \
    for (int p = LOCAL_ID*PER_ITEM_, end_ = MIN_(N_PAIRS, p + PER_ITEM_); p < end_; p++) \
        if (LD(ids, p % ids_ne0, p/ids_ne0, 0, 0) == (expert))
#define PER_ITEM_ ((N_PAIRS + WG - 1)/WG)
#define COUNT_PAIRS(expert) \
    LOCAL_ARRAY(int, counts, WG); \
    int first_ = 0, n_pairs = 0; \
    EACH_PAIR(p, expert) n_pairs++; \
    counts[LOCAL_ID] = n_pairs; \
    BARRIER(); \
    n_pairs = 0; \
    for (int l = 0; l < WG; l++) { if (l == LOCAL_ID) first_ = n_pairs; n_pairs += counts[l]; }
/* indices out of range belong to no expert: one work-group checks for them */
#define NOTE_BAD_PAIRS \
    if (GROUP_ID(0) + GROUP_ID(1) + GROUP_ID(2) == 0) \
        for (int p = LOCAL_ID; p < N_PAIRS; p += WG) IS_ROW(LD(ids, p % ids_ne0, p/ids_ne0, 0, 0), a_ne2, bad);
#define LIST_PAIRS(expert, n0, n) { \
    int c = first_ - (n0); \
    if (c < (n)) EACH_PAIR(p, expert) { \
        if (c >= 0 && c < (n)) { \
            const int slot = p % ids_ne0, token = p/ids_ne0; \
            from[c] = (i64_t)(slot % b_ne1)*b_nb1 + (i64_t)token*b_nb2; \
            to[c] = (i64_t)slot*d_nb1 + (i64_t)token*d_nb2; \
        } \
        c++; \
    } }
