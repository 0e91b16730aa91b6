/* Vectors of floats, and the words that weights and K/V are stored in: all that depends on the processor.

   One source, several builds (see pyproject.toml):

       PK_BF16=1   a word is a pair of bfloat16, two neighbours along the summed dimension    [hi: k+1 | lo: k]
       PK_BF16=0   a word is one float                                                        [       k       ]

       AVX2 + FMA          8 lanes; a pair is widened to two floats in registers, activations are floats
       AVX-512             16 lanes; the same
       AVX-512 + BF16      16 lanes; with PK_BF16 a pair is multiplied as it is (vdpbf16ps), activations are bfloat16

   Whatever the build, a sum over k runs through one accumulator per output in ascending order of k. So the bits of an
   output depend on its own row and column alone: not on how many rows or columns are computed beside it. */
#ifndef PK_VEC_H
#define PK_VEC_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef PK_BF16
#error "say what a word is: -DPK_BF16=0 or 1"
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef uint16_t bf16;

#if defined(__AVX512F__)
#define LANES 16
#if PK_BF16 && defined(__AVX512BF16__)
#define PK_DOT 1
#else
#define PK_DOT 0
#endif
typedef __m512 vf;
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define PK_DOT 0
typedef __m256 vf;
#else
#error "this source needs AVX2 and FMA at least"
#endif

#if PK_BF16
typedef uint32_t word;
#define DEPTH 2 /* values along the summed dimension in one word */
#else
typedef float word;
#define DEPTH 1
#endif

#if PK_DOT
typedef bf16 act; /* what a matrix product reads its rows in */
#define PARTS 1   /* multiply-adds per word */
#else
typedef float act;
#define PARTS DEPTH
#endif

/* -- floats ------------------------------------------------------------------------------------------------------ */

#if LANES == 16

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_floor(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
/* 2^n of whole n, -126 <= n <= 127 */
INLINE vf vf_pow2(vf n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/* x where a >= b or either is NaN, else 0 */
INLINE vf vf_unless_less(vf a, vf b, vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x); }
/* x in the lanes whose index is below n, else y */
INLINE vf vf_first(int n, vf x, vf y) {
    __mmask16 mask = n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
    return _mm512_mask_mov_ps(y, mask, x);
}
INLINE vf vf_from_bf16(const bf16 *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

#else

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_floor(vf a) { return _mm256_floor_ps(a); }
INLINE vf vf_pow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE vf vf_unless_less(vf a, vf b, vf x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x); }
INLINE vf vf_first(int n, vf x, vf y) {
    __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), index);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(below));
}
INLINE vf vf_from_bf16(const bf16 *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

#endif

/* -- whole numbers, 32 bits to a lane ---------------------------------------------------------------------------- */

#if LANES == 16
typedef __m512i vi;
INLINE vi vi_set1(int x) { return _mm512_set1_epi32(x); }
INLINE vi vi_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_right(vi a, int bits) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(bits)); }
INLINE vi vi_left(vi a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
INLINE vi vi_right_signed(vi a, int bits) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(bits)); }
INLINE vi vi_of_bits(vf x) { return _mm512_castps_si512(x); }
INLINE vf vf_of_bits(vi x) { return _mm512_castsi512_ps(x); }
INLINE vf vf_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vf vf_from_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_from_u8(const uint8_t *p) { return vf_from_int(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE vf vf_from_s8(const uint8_t *p) { return vf_from_int(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
#else
typedef __m256i vi;
INLINE vi vi_set1(int x) { return _mm256_set1_epi32(x); }
INLINE vi vi_load(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_right(vi a, int bits) { return _mm256_srli_epi32(a, bits); }
INLINE vi vi_left(vi a, int bits) { return _mm256_slli_epi32(a, bits); }
INLINE vi vi_right_signed(vi a, int bits) { return _mm256_srai_epi32(a, bits); }
INLINE vi vi_of_bits(vf x) { return _mm256_castps_si256(x); }
INLINE vf vf_of_bits(vi x) { return _mm256_castsi256_ps(x); }
INLINE vf vf_from_int(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE vf vf_from_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_from_u8(const uint8_t *p) { return vf_from_int(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf vf_from_s8(const uint8_t *p) { return vf_from_int(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
#endif

/* Over the lanes, always in the same order. */
INLINE float vf_sum(vf x) {
    float lane[LANES], sum = 0;
    vf_store(lane, x);
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}

INLINE float vf_highest(vf x) {
    float lane[LANES];
    vf_store(lane, x);
    float highest = lane[0];
    for (int i = 1; i < LANES; i++) highest = lane[i] > highest ? lane[i] : highest;
    return highest;
}

/* 2^t: whole part through the exponent, fraction by a polynomial (degree 6, relative error below 2e-7). Exactly 0 below
   -126, so that a masked score adds nothing; at most 2^127. NaN stays NaN: hence the order of the operands. */
INLINE vf vf_exp2(vf t) {
    vf clamped = vf_max(vf_set1(-126.0f), vf_min(vf_set1(127.0f), t));
    vf whole = vf_floor(clamped), part = vf_sub(clamped, whole);
    vf p = vf_set1(2.17150213e-4f);
    p = vf_fma(p, part, vf_set1(1.24408782e-3f));
    p = vf_fma(p, part, vf_set1(9.67806391e-3f));
    p = vf_fma(p, part, vf_set1(5.54841533e-2f));
    p = vf_fma(p, part, vf_set1(2.40229517e-1f));
    p = vf_fma(p, part, vf_set1(6.93147004e-1f));
    p = vf_fma(p, part, vf_set1(1.0f));
    return vf_unless_less(t, vf_set1(-126.0f), vf_mul(p, vf_pow2(whole)));
}

/* x * sigmoid(x) */
INLINE vf vf_silu(vf x) {
    vf e = vf_exp2(vf_mul(x, vf_set1(-1.44269504089f)));
    return vf_div(x, vf_add(vf_set1(1.0f), e));
}

/* -- bfloat16 ---------------------------------------------------------------------------------------------------- */

/* Rounded to nearest, ties to even; NaN stays NaN. */
INLINE bf16 bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* -- rows of a matrix product ------------------------------------------------------------------------------------ */

INLINE void act_store(act *p, vf x) {
#if PK_DOT
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    vf_store(p, x);
#endif
}

/* -- words times rows -------------------------------------------------------------------------------------------- */

#if PK_DOT

typedef __m512i vw;  /* LANES words, as a multiply-add takes them */
typedef __m512i vx;  /* a row's values for one word, in every lane */
INLINE vw vw_part(const word *w, int part) { (void)part; return _mm512_loadu_si512(w); }
INLINE vx vx_part(const act *x, int part) {
    (void)part;
    int pair;
    memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
}
INLINE vf v_multiply_add(vf sum, vw w, vx x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }

#else

typedef vf vw;
typedef vf vx;
INLINE vw vw_part(const word *w, int part) {
#if !PK_BF16
    (void)part;
    return vf_load(w);
#elif LANES == 16
    __m512i pair = _mm512_loadu_si512(w);
    return _mm512_castsi512_ps(part ? _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(pair, 16));
#else
    __m256i pair = _mm256_loadu_si256((const __m256i *)w); /* no mask: it would take a register that sums need */
    return _mm256_castsi256_ps(_mm256_slli_epi32(part ? _mm256_srli_epi32(pair, 16) : pair, 16));
#endif
}
INLINE vx vx_part(const act *x, int part) { return vf_set1(x[part]); }
INLINE vf v_multiply_add(vf sum, vw w, vx x) { return vf_fma(x, w, sum); }

#endif

/* sums[r][j] += over `steps` words: row r's values times the words of column vector j.

       w[j]:  LANES words at each step, the next step's `stride` words on
       x:     row r at x + r * row_stride, DEPTH values per step

   At each step so many `lines` of memory are fetched from `next` on, for what is read after this. `rows`, `vectors` and
   `lines` are constants where this is called, so that everything stays in registers. */
INLINE void v_dot(const int rows, const int vectors, vf (*sums)[4], const act *x, size_t row_stride,
                  const word *const *w, size_t stride, int steps, const int lines, const char *next) {
    for (int step = 0; step < steps; step++) {
        UNROLL for (int i = 0; i < lines; i++) _mm_prefetch(next + (step * lines + i) * 64, _MM_HINT_T1);
        UNROLL for (int part = 0; part < PARTS; part++) {
            vw column[4];
            UNROLL for (int j = 0; j < vectors; j++) column[j] = vw_part(w[j] + step * stride, part);
            UNROLL for (int r = 0; r < rows; r++) {
                vx value = vx_part(x + r * row_stride + DEPTH * step, part);
                UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = v_multiply_add(sums[r][j], column[j], value);
            }
        }
    }
}

#if PK_DOT
INLINE vw vw_unit(const word *w) { return vw_part(w, 0); }
#else
INLINE vw vw_unit(const float *w) { return vf_load(w); }
/* `steps` words of `vectors` vectors, the next step's `stride` words on, to floats [steps * DEPTH][vectors * LANES] */
INLINE void v_widen(const int vectors, const word *w, size_t stride, int steps, float *out) {
    for (int step = 0; step < steps; step++, w += stride)
        UNROLL for (int part = 0; part < PARTS; part++)
            UNROLL for (int j = 0; j < vectors; j++, out += LANES) vf_store(out, vw_part(w + j * LANES, part));
}
#endif

#endif
