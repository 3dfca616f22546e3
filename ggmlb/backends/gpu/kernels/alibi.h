/* ALiBi slope of head h: two geometric series, split at the largest power of two of heads. */
DEVICE_FN float alibi_slope(float max_bias, int h, int n_head_log2, float m0, float m1)
{
    return max_bias > 0.0f ? h < n_head_log2 ? POW(m0, (float)(h + 1)) : POW(m1, (float)(2*(h - n_head_log2) + 1)) : 1.0f;
}
