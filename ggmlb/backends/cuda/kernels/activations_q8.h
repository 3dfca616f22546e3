/* Activations in 8 bits, as quantize_q8 writes them: for each row, padded to 256 elements,
   - the numbers: of 256 elements, that is eight pieces, the first 16 bytes of each and then the last 16 of each, so
     that threads with neighbouring pieces read neighbouring vectors;
   - for each piece its step, a float, and the sums of its first and last 16 numbers, two shorts. */
#define PADDED(n) (((n) + 255) & ~255)
#define Q8_AT(piece, half) (256*((piece) >> 3) + 128*(half) + 16*((piece) & 7))
