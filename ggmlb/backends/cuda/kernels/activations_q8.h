/* Activations quantised to 8 bits, as quantize_q8 writes them. Each row is padded to 256 elements and has
   - quants: for each 256 elements (eight sub-blocks of 32), the first 16 bytes of every sub-block, then the last 16 of
     every one, so that threads with neighbouring sub-blocks read neighbouring 16-byte vectors;
   - scale_sums: for each sub-block its scale (a float) and the sums of its first and last 16 quants (two shorts). */
#define PADDED(n) (((n) + 255) & ~255)
#define Q8_AT(sub_block, half) (256*((sub_block) >> 3) + 128*(half) + 16*((sub_block) & 7))

#define EACH_SUB_BLOCK_ UNROLL for (int j = 0; j < N; j++)
/* Round x to the nearest integer, -127 to 127, held in the result's lowest byte: at 1.5*2^23, floats have no fraction. */
DEVICE_FN uint rounded(float x) { return AS_UINT(x + 12582912.0f); }

/* Quantise N sub-blocks, each `apart` after the last. Eight neighbouring threads share a sub-block, four elements each;
   the first of them writes scale_sums. Every thread of the warp must call this (shuffles); only sub-blocks before
   n_sub_blocks are written. */
template <int N> DEVICE_FN void quantize4(const float4 *x, GLOBAL char *quants, GLOBAL char *scale_sums, int sub_block,
                                          int apart, int n_sub_blocks)
{
    const int part = LOCAL_ID & 7;
    float amax[N];
    uint word[N];
    int sum[N], other[N];
    EACH_SUB_BLOCK_ amax[j] = FMAX(FMAX(FABS(x[j].x), FABS(x[j].y)), FMAX(FABS(x[j].z), FABS(x[j].w)));
    UNROLL for (int o = 1; o < 8; o <<= 1) EACH_SUB_BLOCK_ amax[j] = FMAX(amax[j], __shfl_xor_sync(0xffffffffu, amax[j], o));
    EACH_SUB_BLOCK_ {
        const float up = amax[j] > 0.0f ? __fdividef(127.0f, amax[j]) : 0.0f;
        word[j] = __byte_perm(__byte_perm(rounded(x[j].x*up), rounded(x[j].y*up), 0x0040u),
                              __byte_perm(rounded(x[j].z*up), rounded(x[j].w*up), 0x0040u), 0x5410u);
        sum[j] = __dp4a((int)word[j], 0x01010101, 0);
    }
    UNROLL for (int o = 1; o < 4; o <<= 1) EACH_SUB_BLOCK_ sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], o);
    EACH_SUB_BLOCK_ other[j] = __shfl_xor_sync(0xffffffffu, sum[j], 4);
    EACH_SUB_BLOCK_ {
        const int p = sub_block + j*apart;
        if (p >= n_sub_blocks) break;
        *(GLOBAL uint *)(quants + Q8_AT(p, part >> 2) + 4*(part & 3)) = word[j];
        if (part == 0)
            *(GLOBAL int2 *)(scale_sums + 8*p) =
                make_int2((int)AS_UINT(amax[j]*(1.0f/127.0f)), (sum[j] & 0xffff) | other[j] << 16);
    }
}
