/* What is done once, when a model is loaded: blocks of a GGUF file to floats, matrices to panels. Not part of a step.

   How the file has them, `GROUP` = 32 values to a group:

       Q4_0   a group      d half | 16 bytes, nibbles
       Q4_1   a group      d half | m half | 16 bytes, nibbles
       Q8_0   a group      d half | 32 signed bytes
       Q4_K   8 groups     d half | m half | 12 bytes, 6 bits of s and of t for each group | 128 bytes, nibbles
       Q6_K   8 groups     128 bytes, nibbles | 64 bytes, twos | 16 signed bytes, s for each half group | d half

   The low nibbles of n bytes come first, then the high ones: n is 16, with Q4_K 32, with Q6_K 64. */

#include "pk.h"

/* A group taken apart. `numbers` are without any offset (Q8_0: signed); what a kind does not have is 0. */
typedef struct {
    uint8_t numbers[GROUP];
    uint16_t d, m;
    uint8_t s, t;
} parts;

INLINE int block_groups(const int kind) { return kind == Q4_K || kind == Q6_K ? 8 : 1; }

INLINE size_t block_bytes(const int kind) {
    return kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == Q8_0 ? 34 : kind == Q4_K ? 144 : 210;
}

INLINE uint16_t half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return bits;
}

INLINE void two_halves(const uint8_t *nibbles, parts *p) {
    for (int i = 0; i < 16; i++) p->numbers[i] = nibbles[i] & 15;
    for (int i = 0; i < 16; i++) p->numbers[16 + i] = nibbles[i] >> 4;
}

/* The first four groups' s and t lie in the low 6 bits of a byte each; those of the others in a nibble of the last four bytes
   and the upper 2 bits of the first ones. */
INLINE void read_q4_k(const uint8_t *block, int group, parts *p) {
    const uint8_t *packed = block + 4, *nibbles = block + 16 + group / 2 * 32;
    const int i = group % 4;
    p->s = group < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | packed[i] >> 6 << 4;
    p->t = group < 4 ? packed[4 + i] & 63 : packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
    for (int j = 0; j < GROUP; j++) p->numbers[j] = nibbles[j] >> group % 2 * 4 & 15;
}

INLINE void read_q6_k(const uint8_t *block, int group, parts *p) {
    const int part = group % 4; /* of 128 values */
    const uint8_t *low = block + group / 4 * 64 + part % 2 * 32, *high = block + 128 + group / 4 * 32;
    for (int j = 0; j < GROUP; j++)
        p->numbers[j] = (uint8_t)((low[j] >> part / 2 * 4 & 15) | (high[j] >> 2 * part & 3) << 4);
    p->s = block[192 + 2 * group];
    p->t = block[192 + 2 * group + 1];
}

INLINE parts read_group(const int kind, const uint8_t *row, int64_t group) {
    const uint8_t *block = row + (size_t)(group / block_groups(kind)) * block_bytes(kind);
    parts p = {.d = half_at(kind == Q6_K ? block + 208 : block)};
    if (kind == Q4_1 || kind == Q4_K) p.m = half_at(block + 2);
    if (kind == Q4_0) two_halves(block + 2, &p);
    if (kind == Q4_1) two_halves(block + 4, &p);
    if (kind == Q8_0) memcpy(p.numbers, block + 2, GROUP);
    if (kind == Q4_K) read_q4_k(block, (int)(group % 8), &p);
    if (kind == Q6_K) read_q6_k(block, (int)(group % 8), &p);
    return p;
}

/* -- floats ------------------------------------------------------------------------------------------------------ */

/* Products and sums are rounded one by one, in the order in which the `gguf` package takes them. */
INLINE void widen(const int kind, const parts *p, float *out) {
    const float d = _cvtsh_ss(p->d), m = _cvtsh_ss(p->m);
    const float scale = kind == Q4_K ? d * (float)p->s : d, offset = m * (float)p->t;
    const float halves[2] = {d * (float)(int8_t)p->s, d * (float)(int8_t)p->t};
    for (int i = 0; i < GROUP; i++) {
        const float number = (float)p->numbers[i];
        out[i] = kind == Q4_0   ? scale * (number - 8.0f)
                 : kind == Q4_1 ? scale * number + m
                 : kind == Q8_0 ? scale * (float)(int8_t)p->numbers[i]
                 : kind == Q4_K ? scale * number - offset
                                : halves[i / 16] * (number - 32.0f);
    }
}

INLINE void widen_all(const int kind, const uint8_t *data, int64_t groups, float *out) {
    for (int64_t g = 0; g < groups; g++, out += GROUP) {
        const parts p = read_group(kind, data, g);
        widen(kind, &p, out);
    }
}

#define CASE(kind) \
    case kind: widen_all(kind, data, groups, out); break;

/* `groups` groups of a known kind at `data`, whole blocks, to floats at `out`. */
void pk_dequantize(int kind, const uint8_t *data, int64_t groups, float *out) {
    switch (kind) { EACH_KIND(CASE) }
}
#undef CASE

/* -- panels ------------------------------------------------------------------------------------------------------ */

/* Numbers of `bits` bits to words, the first lowest; word i of the column is PANEL words after word i - 1. */
INLINE uint32_t *put_words(const uint8_t *numbers, const int bits, const int shift, uint32_t *out) {
    const int in_word = 32 / bits;
    for (int i = 0; i < GROUP; i += in_word, out += PANEL) {
        uint32_t word = 0;
        for (int j = 0; j < in_word; j++) word |= (uint32_t)(numbers[i + j] >> shift & ((1 << bits) - 1)) << bits * j;
        *out = word;
    }
    return out;
}

/* One column's part of a group as quantized.c draws it. */
INLINE void put_column(const int kind, const parts *p, int column, char *group) {
    uint32_t *words = (uint32_t *)group + column;
    words = put_words(p->numbers, kind == Q8_0 ? 8 : 4, 0, words);
    if (kind == Q6_K) words = put_words(p->numbers, 2, 4, words);
    uint16_t *halves = (uint16_t *)(words - column) + column;
    *halves = p->d;
    halves += PANEL;
    if (kind == Q4_1 || kind == Q4_K) {
        *halves = p->m;
        halves += PANEL;
    }
    uint8_t *scales = (uint8_t *)(halves - column) + column;
    if (kind == Q4_K || kind == Q6_K) {
        scales[0] = p->s;
        scales[PANEL] = p->t;
    }
}

INLINE void pack_all(const int kind, const uint8_t *data, int64_t rows, int groups, char *out) {
    const size_t row_bytes = (size_t)(groups / block_groups(kind)) * block_bytes(kind), group_bytes = quantized_group_bytes(kind);
    for (int64_t first = 0; first < rows; first += PANEL)
        for (int g = 0; g < groups; g++, out += group_bytes) {
            if (rows - first < PANEL) memset(out, 0, group_bytes); /* rows that are not there have scales of 0 */
            for (int column = 0; column < PANEL && first + column < rows; column++) {
                const parts p = read_group(kind, data + (size_t)(first + column) * row_bytes, g);
                put_column(kind, &p, column, out);
            }
        }
}

#define CASE(kind) \
    case kind: pack_all(kind, data, rows, groups, out); break;

/* Rows of `groups` groups of a known kind to panels; the last one is filled up. */
void pk_pack_quantized(int kind, const uint8_t *data, int64_t rows, int groups, char *out) {
    switch (kind) { EACH_KIND(CASE) }
}

#define LINE 16 /* words of a line of the caches, which is read once */

/* Rows of `words` words to panels [.., depth, PANEL] of words; rows and words that are not there are 0. */
void pk_pack_words(const uint32_t *data, int64_t rows, int64_t words, int64_t depth, uint32_t *out) {
    for (int64_t first = 0; first < rows; first += PANEL, out += depth * PANEL) {
        const int count = rows - first < PANEL ? (int)(rows - first) : PANEL;
        if (count < PANEL || words < depth) memset(out, 0, sizeof *out * (size_t)depth * PANEL);
        for (int64_t k = 0; k < words; k += LINE) {
            const int length = words - k < LINE ? (int)(words - k) : LINE;
            for (int column = 0; column < count; column++) {
                const uint32_t *from = data + (first + column) * words + k;
                for (int i = 0; i < length; i++) out[(k + i) * PANEL + column] = from[i];
            }
        }
    }
}
