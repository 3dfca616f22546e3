/* ptx.h on the host: what each function's instruction does. */
DEVICE_FN float half_to_float_(ushort h)
{
    const uint sign = (uint)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31) return __uint_as_float(sign | 0x7f800000u | m << 13);
    if (e == 0) return (sign ? -1.0f : 1.0f)*(float)m*5.9604644775390625e-8f;
    return __uint_as_float(sign | (e + 112) << 23 | m << 13);
}
DEVICE_FN ushort float_to_half_(float f)     /* to nearest, ties to even */
{
    const uint u = __float_as_uint(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (ushort)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (ushort)(sign | 0x7c00u);                                /* 65520 and more */
    if (a < 0x38800000u) return (ushort)(sign | (uint)(int)rintf(__uint_as_float(a)*16777216.0f));
    return (ushort)(sign | (a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13);
}
DEVICE_FN int dp4a_unsigned_(int a, int b, int c)
{
    for (int j = 0; j < 4; j++) c += (int)((uint)a >> 8*j & 255u)*(int)(signed char)((uint)b >> 8*j & 255u);
    return c;
}
typedef uint whole_ __attribute__((vector_size(16)));      /* which the compiler does not read in parts */
DEVICE_FN uint4 load16_once(const void *p)
{
    const whole_ w = *(const whole_ *)p;
    return make_uint4(w[0], w[1], w[2], w[3]);
}
DEVICE_FN float exp2_(float x) { return exp2f(x); }

/* the two halves of row r from column c on, or of column c from row r on */
DEVICE_FN uint pick_(int matrix, int r, int c, bool down)
{
    uint pair = 0;
    for (int i = 0; i < 2; i++) {
        const char *row;
        memcpy(&row, emulator::of_lane(8*matrix + r + (down ? i : 0)), sizeof row);
        pair |= (uint)((const ushort *)row)[c + (down ? 0 : i)] << 16*i;
    }
    return pair;
}
DEVICE_FN void load_matrices_(uint *r, const void *p, bool transposed)
{
    if ((size_t)p % 16) __builtin_trap();
    memcpy(emulator::of_lane(emulator::lane()), &p, sizeof p);
    emulator_warp_barrier(0xffffffffu, __COUNTER__, false);
    const int l = emulator::lane();
    for (int i = 0; i < 4; i++) r[i] = transposed ? pick_(i, 2*(l & 3), l/4, true) : pick_(i, l/4, 2*(l & 3), false);
    emulator_warp_barrier(0xffffffffu, __COUNTER__, false);
}
DEVICE_FN void load_matrices(uint *r, const void *p) { load_matrices_(r, p, false); }
DEVICE_FN void load_matrices_transposed(uint *r, const void *p) { load_matrices_(r, p, true); }

/* element (row, k) of a, or (k, column) of b, from the registers of the thread that has it */
DEVICE_FN float half_of_(int lane, int reg, int odd)
{
    uint w;
    memcpy(&w, (char *)emulator::of_lane(lane) + 4*reg, 4);
    return half_to_float_((ushort)(w >> 16*odd));
}
DEVICE_FN void multiply_add(float *d, const uint *a, const uint *b)
{
    char *mine = (char *)emulator::of_lane(emulator::lane());
    memcpy(mine, a, 16);
    memcpy(mine + 16, b, 8);
    emulator_warp_barrier(0xffffffffu, __COUNTER__, false);
    const int l = emulator::lane();
    float sum[4];
    for (int e = 0; e < 4; e++) {
        const int row = l/4 + 8*(e >> 1), column = 2*(l & 3) + (e & 1);
        sum[e] = d[e];
        for (int k = 0; k < 16; k++) {
            const float x = half_of_(4*(row & 7) + (k & 7)/2, (row >> 3) + 2*(k >> 3), k & 1);
            const float y = half_of_(4*column + (k & 7)/2, 4 + (k >> 3), k & 1);
            sum[e] += x*y;
        }
    }
    emulator_warp_barrier(0xffffffffu, __COUNTER__, false);
    for (int e = 0; e < 4; e++) d[e] = sum[e];
}

DEVICE_FN void copy16_async(void *to, const void *from, bool valid)
{
    const uint4 value = valid ? load16_once(from) : make_uint4(0, 0, 0, 0);
    emulator_copy_later(to, &value);
}
DEVICE_FN void copy_commit() { emulator_copy_commit(); }
template <int n> DEVICE_FN void copy_wait_but() { emulator_copy_wait_but(n); }

/* a shared array that the emulator knows, with bytes around it that belong to nobody */
#undef LOCAL_ARRAY
#define LOCAL_ARRAY(T, name, n) \
    static __attribute__((section("shared_memory"))) struct { T elements[n]; char nobody[256]; } name##_shared_; \
    T (&name)[n] = name##_shared_.elements; \
    emulator_declare(#name, name, sizeof name)
#undef MAY_BE_READ
#define MAY_BE_READ(x) emulator_may_be_read(&(x), sizeof (x));
