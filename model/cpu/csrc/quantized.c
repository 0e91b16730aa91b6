/* Weights as a GGUF file has them, widened to the very values that dequantizing gives: the same products, the same sums,
   from a third to a sixth of the bytes.

   Panels of PANEL columns as ever, cut along the depth into groups of GROUP = 32 values. Within a group, column c has lane
   c of each line of 32 words, so that LANES columns are taken apart at once:

       nibbles:  word i holds values 8i .. 8i+7, the first lowest          i = 0 .. 3
       bytes:    word i holds values 4i .. 4i+3                            i = 0 .. 7
       twos:     word i holds the upper 2 bits of values 16i .. 16i+15     i = 0, 1

       Q4_0   nibbles | d half                               value = d * (q - 8)
       Q4_1   nibbles | d half | m half                      value = d * q + m
       Q8_0   bytes   | d half                               value = d * q
       Q4_K   nibbles | d half | m half | s byte | t byte    value = (d * s) * q - (m * t)
       Q6_K   nibbles | twos | d half | s byte, twice        value = (d * s) * (q - 32), an s for each 16 values

   each after the other for all 32 columns. Products and sums are rounded one by one, as numpy does where the weights are
   dequantized; with PK_BF16 the value is then rounded to bfloat16, as torch does. */

#include "pk.h"

enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14 }; /* GGUF's own numbers */

#define NIBBLES (4 * PANEL * sizeof(uint32_t))
#define BYTES (8 * PANEL * sizeof(uint32_t))
#define TWOS (2 * PANEL * sizeof(uint32_t))
#define HALF (PANEL * sizeof(uint16_t))

size_t quantized_group_bytes(int kind) {
    switch (kind) {
        case Q4_0: return NIBBLES + HALF;
        case Q4_1: return NIBBLES + 2 * HALF;
        case Q8_0: return BYTES + HALF;
        case Q4_K: return NIBBLES + 2 * HALF + 2 * PANEL;
        case Q6_K: return NIBBLES + TWOS + HALF + 2 * PANEL;
        default: return 0;
    }
}

/* The scale and offset of some columns in half a group: value = scale * q + offset. */
typedef struct {
    vf scale, offset;
} affine;

INLINE affine read_affine(const int kind, const char *group, int column, int half) {
    const uint16_t *d = (const uint16_t *)(group + (kind == Q8_0 ? BYTES : kind == Q6_K ? NIBBLES + TWOS : NIBBLES));
    affine a = {vf_from_half(d + column), vf_zero()};
    if (kind == Q4_1) a.offset = vf_from_half(d + PANEL + column);
    if (kind == Q4_K) {
        const uint8_t *scales = (const uint8_t *)(d + 2 * PANEL);
        a.scale = vf_mul(a.scale, vf_from_u8(scales + column));
        a.offset = vf_sub(vf_zero(), vf_mul(vf_from_half(d + PANEL + column), vf_from_u8(scales + PANEL + column)));
    }
    if (kind == Q6_K) a.scale = vf_mul(a.scale, vf_from_s8((const uint8_t *)(d + PANEL) + half * PANEL + column));
    return a;
}

/* Value k of the group, of the columns' words that hold it. */
INLINE vf whole_number(const int kind, const uint32_t *words, int k) {
    if (kind == Q8_0) return vf_from_int(vi_right_signed(vi_left(vi_load(words + k / 4 * PANEL), 24 - 8 * (k % 4)), 24));
    vi q = vi_and(vi_right(vi_load(words + k / 8 * PANEL), 4 * (k % 8)), vi_set1(15));
    if (kind == Q4_0) q = vi_add(q, vi_set1(-8));
    if (kind == Q6_K) {
        vi upper = vi_and(vi_right(vi_load(words + (4 + k / 16) * PANEL), 2 * (k % 16)), vi_set1(3));
        q = vi_add(vi_or(q, vi_left(upper, 4)), vi_set1(-32));
    }
    return vf_from_int(q);
}

INLINE vf dequantize(const int kind, const uint32_t *words, affine a, int k) {
    vf value = vf_mul(a.scale, whole_number(kind, words, k));
    return kind == Q4_1 || kind == Q4_K ? vf_add(value, a.offset) : value;
}

#if PK_BF16
/* The bits of a float rounded to bfloat16, in the upper half of each lane; the lower half is not cleared. */
INLINE vi round_bits(vf value) {
    vi bits = vi_of_bits(value);
    return vi_add(bits, vi_add(vi_set1(0x7fff), vi_and(vi_right(bits, 16), vi_set1(1))));
}
#endif

/* What is multiplied with values k .. of the rows: one value, or two as a pair. */
INLINE vw unit_of(const int kind, const uint32_t *words, affine a, int k) {
    vf value = dequantize(kind, words, a, k);
#if PK_DOT
    vi odd = round_bits(dequantize(kind, words, a, k + 1));
    return vi_or(vi_right(round_bits(value), 16), vi_and(odd, vi_set1((int)0xffff0000u)));
#elif PK_BF16
    return vf_of_bits(vi_and(round_bits(value), vi_set1((int)0xffff0000u)));
#else
    return value;
#endif
}

INLINE void unit_store(unit *p, vw w) {
#if PK_DOT
    _mm512_storeu_si512(p, w);
#else
    vf_store(p, w);
#endif
}

/* -- many rows: units, to be multiplied by linear.c -------------------------------------------------------------- */

INLINE void group_units(const int kind, const char *group, int column, size_t stride, unit *out) {
    const uint32_t *words = (const uint32_t *)group + column;
    for (int half = 0; half < 2; half++) {
        const affine a = read_affine(kind, group, column, half);
        UNROLL for (int i = 0; i < GROUP / 2; i += UNIT_DEPTH) {
            const int k = half * GROUP / 2 + i;
            unit_store(out + (size_t)k / UNIT_DEPTH * stride, unit_of(kind, words, a, k));
        }
    }
}

INLINE void units(const int kind, const char *group, int groups, int column, int vectors, unit *out) {
    const size_t stride = (size_t)vectors * LANES;
    for (int g = 0; g < groups; g++, group += quantized_group_bytes(kind), out += GROUP / UNIT_DEPTH * stride)
        for (int j = 0; j < vectors; j++) group_units(kind, group, column + j * LANES, stride, out + j * LANES);
}

#define CASE(kind)                                            \
    case kind:                                                \
        units(kind, group, groups, column, vectors, out);     \
        break;

void quantized_units(int kind, const char *group, int groups, int column, int vectors, unit *out) {
    switch (kind) { CASE(Q4_0) CASE(Q4_1) CASE(Q8_0) CASE(Q4_K) CASE(Q6_K) }
}
#undef CASE

/* -- few rows: multiplied as they are widened -------------------------------------------------------------------- */

INLINE void dot(const int kind, const int rows, const char *group, int groups, const act *x, size_t stride, float *y) {
    vf sums[QUANTIZED_ROWS][PANEL / LANES];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < PANEL / LANES; j++) sums[r][j] = vf_zero();
    for (int g = 0; g < groups; g++, group += quantized_group_bytes(kind), x += GROUP)
        for (int half = 0; half < 2; half++) {
            affine a[PANEL / LANES];
            UNROLL for (int j = 0; j < PANEL / LANES; j++) a[j] = read_affine(kind, group, j * LANES, half);
            UNROLL for (int i = 0; i < GROUP / 2; i += UNIT_DEPTH) {
                const int k = half * GROUP / 2 + i;
                UNROLL for (int j = 0; j < PANEL / LANES; j++) {
                    vw w = unit_of(kind, (const uint32_t *)group + j * LANES, a[j], k);
                    UNROLL for (int r = 0; r < rows; r++)
                        sums[r][j] = v_multiply_add(sums[r][j], w, vx_part(x + r * stride + k, 0));
                }
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < PANEL / LANES; j++) vf_store(y + r * PANEL + j * LANES, sums[r][j]);
}

#define CASE(kind)                                                         \
    case kind:                                                             \
        if (rows == 1)                                                     \
            dot(kind, 1, group, groups, x, stride, y);                     \
        else if (rows == 2)                                                \
            dot(kind, 2, group, groups, x, stride, y);                     \
        else                                                               \
            dot(kind, 3, group, groups, x, stride, y);                     \
        break;

void quantized_dot(int kind, int rows, const char *group, int groups, const act *x, size_t stride, float *y) {
    switch (kind) { CASE(Q4_0) CASE(Q4_1) CASE(Q8_0) CASE(Q4_K) CASE(Q6_K) }
}
