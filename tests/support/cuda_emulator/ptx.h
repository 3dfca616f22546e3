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
DEVICE_FN uint4 load16_once(const void *p) { return *(const uint4 *)p; }
