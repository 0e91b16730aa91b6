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
   dequantized; with PK_BF16 the value is then rounded to bfloat16, as torch does.

   Few operations make it fast, and none of these changes a bit:
   - A number is masked where it stands in its word, not moved to the lowest bits: it comes out times a power of two, by
     which the scale is divided beforehand.
   - The product of a scale and a number has 11 + 7 + 5 bits at most, so it is exact; fused with the sum it rounds once, as
     numpy does. */

#include "pk.h"

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

#define OCTET 8 /* values that are taken apart alike; four make a group */

/* The scale and offset of some columns in half a group: value i of an octet = scale[i] * (q << shift_of(i)) + offset.
   Where all shifts are the same only scale[0] is there. */
typedef struct {
    vf scale[OCTET], offset;
} affine;

INLINE int is_nibbles(const int kind) { return kind == Q4_0 || kind == Q4_1 || kind == Q4_K; }

/* Where value i of an octet stands when it has been masked: its lowest bit. */
INLINE int shift_of(const int kind, int i) {
    if (kind == Q8_0) return 24;
    return is_nibbles(kind) && i != 7 ? 4 * i : 0;
}

INLINE affine read_affine(const int kind, const char *group, int column, int half) {
    const uint16_t *d = (const uint16_t *)(group + (kind == Q8_0 ? BYTES : kind == Q6_K ? NIBBLES + TWOS : NIBBLES));
    affine a = {.offset = vf_zero()};
    vf scale = vf_from_half(d + column);
    if (kind == Q4_1) a.offset = vf_from_half(d + PANEL + column);
    if (kind == Q4_K) {
        const uint8_t *scales = (const uint8_t *)(d + 2 * PANEL);
        scale = vf_mul(scale, vf_from_u8(scales + column));
        vf offset = vf_mul(vf_from_half(d + PANEL + column), vf_from_u8(scales + PANEL + column));
        a.offset = vf_mul(offset, vf_set1(-1.0f));
    }
    if (kind == Q6_K) scale = vf_mul(scale, vf_from_s8((const uint8_t *)(d + PANEL) + half * PANEL + column));
    UNROLL for (int i = 0; i < OCTET; i++)
        if (i == 0 || is_nibbles(kind)) a.scale[i] = vf_mul(scale, vf_set1(1.0f / (float)(1 << shift_of(kind, i))));
    return a;
}

/* Value i of an octet, shifted left by shift_of, of the columns' words that hold it. */
INLINE vf whole_number(const int kind, const uint32_t *words, int octet, int i) {
    if (kind == Q8_0) {
        vi q = vi_left(vi_load(words + (2 * octet + i / 4) * PANEL), 24 - 8 * (i % 4));
        return vf_from_int(vi_and(q, vi_set1((int)0xff000000u)));
    }
    vi q = vi_load(words + octet * PANEL);
    if (is_nibbles(kind)) {
        const int shift = shift_of(kind, i);
        vf number = vf_from_int(i == 7 ? vi_right(q, 28) : vi_and(q, vi_set1(15 << shift)));
        return kind == Q4_0 ? vf_sub(number, vf_set1((float)(8 << shift))) : number;
    }
    vi twos = vi_right(vi_load(words + (4 + octet / 2) * PANEL), octet % 2 * 16);
    vi upper = vi_left(vi_and(vi_right(twos, 2 * i), vi_set1(3)), 4);
    return vf_from_int(vi_add(vi_or(vi_and(vi_right(q, 4 * i), vi_set1(15)), upper), vi_set1(-32)));
}

INLINE vf dequantize(const int kind, const uint32_t *words, const affine *a, int octet, int i) {
    vf number = whole_number(kind, words, octet, i), scale = a->scale[is_nibbles(kind) ? i : 0];
    return kind == Q4_1 || kind == Q4_K ? vf_fma(number, scale, a->offset) : vf_mul(number, scale);
}

#if PK_BF16
/* To the nearest bfloat16, ties to even, in the upper half of each lane: the float is split into 8 bits and the rest (Veltkamp).
   For the values of weights, far from overflow. */
INLINE vf rounded(vf value) {
    vf scaled = vf_mul(value, vf_set1(65537.0f));
    return vf_sub(scaled, vf_sub(scaled, value));
}
#endif

/* What is multiplied with values i .. of the rows: one value, or two as a pair. */
INLINE vw unit_of(const int kind, const uint32_t *words, const affine *a, int octet, int i) {
    vf value = dequantize(kind, words, a, octet, i);
#if PK_DOT
    vf odd = dequantize(kind, words, a, octet, i + 1);
    return vi_or(vi_right(vi_of_bits(rounded(value)), 16), vi_of_bits(rounded(odd)));
#elif PK_BF16
    return rounded(value);
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
        for (int octet = 2 * half; octet < 2 * half + 2; octet++)
            UNROLL for (int i = 0; i < OCTET; i += UNIT_DEPTH, out += stride)
                unit_store(out, unit_of(kind, words, &a, octet, i));
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
    switch (kind) { EACH_KIND(CASE) }
}
#undef CASE

/* -- few rows: multiplied as they are widened -------------------------------------------------------------------- */

/* `vectors` vectors of columns at a time, such that sums and offsets stay in registers. */
INLINE void dot(const int kind, const int rows, const int vectors, const char *panel, int groups, const act *x, size_t stride,
                float *y) {
    const size_t group_bytes = quantized_group_bytes(kind);
    for (int column = 0; column < PANEL; column += vectors * LANES) {
        const char *group = panel;
        vf sums[QUANTIZED_ROWS][PANEL / LANES];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
        for (int g = 0; g < groups; g++, group += group_bytes)
            for (int half = 0; half < 2; half++) {
                affine a[PANEL / LANES];
                UNROLL for (int j = 0; j < vectors; j++) a[j] = read_affine(kind, group, column + j * LANES, half);
                for (int octet = 2 * half; octet < 2 * half + 2; octet++) {
                    const act *values = x + g * GROUP + octet * OCTET;
                    UNROLL for (int i = 0; i < OCTET; i += UNIT_DEPTH)
                        UNROLL for (int j = 0; j < vectors; j++) {
                            vw w = unit_of(kind, (const uint32_t *)group + column + j * LANES, &a[j], octet, i);
                            UNROLL for (int r = 0; r < rows; r++)
                                sums[r][j] = v_multiply_add(sums[r][j], w, vx_part(values + r * stride + i, 0));
                        }
                }
            }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++) vf_store(y + r * PANEL + column + j * LANES, sums[r][j]);
    }
}

#define ROWS(kind, n, vectors)                                \
    case n:                                                   \
        dot(kind, n, vectors, group, groups, x, stride, y);   \
        break;
#define CASE(kind)                                                                                                        \
    case kind:                                                                                                            \
        switch (rows) {                                                                                                   \
            ROWS(kind, 1, PANEL / LANES) ROWS(kind, 2, PANEL / LANES) ROWS(kind, 3, 2) ROWS(kind, 4, 2) ROWS(kind, 5, 2) \
            ROWS(kind, 6, 2)                                                                                              \
        }                                                                                                                 \
        break;

void quantized_dot(int kind, int rows, const char *group, int groups, const act *x, size_t stride, float *y) {
    switch (kind) { EACH_KIND(CASE) }
}
