/* Activations in 8 bits, as quantize_q8 writes them: for each row, padded to 256 elements,
   - the numbers: of 256 elements, that is eight pieces, the first 16 bytes of each and then the last 16 of each, so
     that threads with neighbouring pieces read neighbouring vectors;
   - for each piece its step, a float, and the sums of its first and last 16 numbers, two shorts. */
#define PADDED(n) (((n) + 255) & ~255)
#define Q8_AT(piece, half) (256*((piece) >> 3) + 128*(half) + 16*((piece) & 7))

/* Eight neighbouring threads have four elements each of a piece of 32: thread `part` writes its numbers, and the first
   one the facts. All threads of the warp come here; those without a piece say so. */
DEVICE_FN void quantize4(const float *x, int part, bool valid, GLOBAL char *numbers, GLOBAL char *facts, int piece)
{
    float most = 0.0f;
    UNROLL for (int j = 0; j < 4; j++) most = FMAX(most, FABS(x[j]));
    UNROLL for (int o = 1; o < 8; o <<= 1) most = FMAX(most, __shfl_xor_sync(0xffffffffu, most, o));
    const float up = most > 0.0f ? 127.0f/most : 0.0f;
    uint w[4];                                   /* 1.5*2^23 more than the rounded number: its bits are the lowest */
    UNROLL for (int j = 0; j < 4; j++) w[j] = AS_UINT(FMA(x[j], up, 12582912.0f));
    const uint word = __byte_perm(__byte_perm(w[0], w[1], 0x0040u), __byte_perm(w[2], w[3], 0x0040u), 0x5410u);
    int sum = __dp4a((int)word, 0x01010101, 0);
    UNROLL for (int o = 1; o < 4; o <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    const int other = __shfl_xor_sync(0xffffffffu, sum, 4);
    if (!valid) return;
    *(GLOBAL uint *)(numbers + Q8_AT(piece, part >> 2) + 4*(part & 3)) = word;
    if (part == 0) *(GLOBAL int2 *)(facts + 8*piece) = make_int2((int)AS_UINT(most/127.0f), (sum & 0xffff) | other << 16);
}
