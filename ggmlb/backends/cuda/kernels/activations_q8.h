/* Activations in 8 bits, as quantize_q8 writes them: for each row, padded to 256 elements,
   - the numbers: of 256 elements, that is eight pieces, the first 16 bytes of each and then the last 16 of each, so
     that threads with neighbouring pieces read neighbouring vectors;
   - for each piece its step, a float, and the sums of its first and last 16 numbers, two shorts. */
#define PADDED(n) (((n) + 255) & ~255)
#define Q8_AT(piece, half) (256*((piece) >> 3) + 128*(half) + 16*((piece) & 7))

#define EACH_PIECE_ UNROLL for (int j = 0; j < N; j++)
/* a word whose lowest byte is the nearest whole number: 1.5*2^23 more than that has no bits for fractions */
DEVICE_FN uint rounded(float x) { return AS_UINT(x + 12582912.0f); }

/* Eight neighbouring threads have four elements each of a piece of 32, or of N pieces, `apart` from one to the next:
   each writes its numbers, and the first one the facts. All threads of the warp come here, with what is before n_pieces
   or not. */
template <int N> DEVICE_FN void quantize4(const float4 *x, GLOBAL char *numbers, GLOBAL char *facts, int piece, int apart,
                                          int n_pieces)
{
    const int part = LOCAL_ID & 7;
    float most[N];
    uint word[N];
    int sum[N], other[N];
    EACH_PIECE_ most[j] = FMAX(FMAX(FABS(x[j].x), FABS(x[j].y)), FMAX(FABS(x[j].z), FABS(x[j].w)));
    UNROLL for (int o = 1; o < 8; o <<= 1) EACH_PIECE_ most[j] = FMAX(most[j], __shfl_xor_sync(0xffffffffu, most[j], o));
    EACH_PIECE_ {
        const float up = most[j] > 0.0f ? __fdividef(127.0f, most[j]) : 0.0f;
        word[j] = __byte_perm(__byte_perm(rounded(x[j].x*up), rounded(x[j].y*up), 0x0040u),
                              __byte_perm(rounded(x[j].z*up), rounded(x[j].w*up), 0x0040u), 0x5410u);
        sum[j] = __dp4a((int)word[j], 0x01010101, 0);
    }
    UNROLL for (int o = 1; o < 4; o <<= 1) EACH_PIECE_ sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], o);
    EACH_PIECE_ other[j] = __shfl_xor_sync(0xffffffffu, sum[j], 4);
    EACH_PIECE_ {
        const int p = piece + j*apart;
        if (p >= n_pieces) break;
        *(GLOBAL uint *)(numbers + Q8_AT(p, part >> 2) + 4*(part & 3)) = word[j];
        if (part == 0)
            *(GLOBAL int2 *)(facts + 8*p) = make_int2((int)AS_UINT(most[j]*(1.0f/127.0f)), (sum[j] & 0xffff) | other[j] << 16);
    }
}
