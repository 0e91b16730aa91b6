/* AVX-512 computed with AVX2: found before the compiler's own header of this name, it lets the AVX-512 builds of
   model/cpu/csrc run on processors without it. Only the functions that csrc/vec.h calls, each by what Intel's manual
   (Software Developer's Manual, volume 2) says that its instruction does.

   The types are the compiler's own, and so are sums and products: it computes vectors of 64 bytes in two halves. The
   functions' own names are taken by macros, as without -mavx512f the compiler refuses the real ones.

   (SIMDe 0.7.4, which emulates far more, lacks nine of these functions, and its _mm512_roundscale_ps rounds to halves
   where the constant is written as a sum of flags.) */
#ifndef PAGEKV_TESTS_IMMINTRIN_H
#define PAGEKV_TESTS_IMMINTRIN_H

#include_next <immintrin.h>

#include <stdint.h>
#include <string.h>

#define EMULATED static inline __attribute__((always_inline))

typedef float pk_f32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t pk_s32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t pk_u32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t pk_u16 __attribute__((vector_size(32), may_alias));
typedef uint8_t pk_u8 __attribute__((vector_size(16), may_alias));
typedef int8_t pk_s8 __attribute__((vector_size(16), may_alias));

typedef union {
    __m512 f;
    __m512i i;
    __m256 half[2];
    __m256i half_i[2];
    float lane[16];
    int32_t lane_i[16];
} pk_512;

/* -- floats ------------------------------------------------------------------------------------------------------ */

#define _mm512_setzero_ps() ((__m512){0})
EMULATED __m512 pk_set1_ps(float x) {
    __m256 half = _mm256_set1_ps(x);
    return (pk_512){.half = {half, half}}.f;
}
#define _mm512_set1_ps(x) pk_set1_ps(x)
#define _mm512_loadu_ps(p) ((__m512) * (const pk_f32 *)(p))
#define _mm512_storeu_ps(p, x) ((void)(*(pk_f32 *)(p) = (pk_f32)(x)))
#define _mm512_add_ps(a, b) ((__m512)((a) + (b)))
#define _mm512_sub_ps(a, b) ((__m512)((a) - (b)))
#define _mm512_mul_ps(a, b) ((__m512)((a) * (b)))
#define _mm512_div_ps(a, b) ((__m512)((a) / (b)))

EMULATED __m512 pk_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    pk_512 x = {a}, y = {b}, z = {c};
    return (pk_512){.half = {_mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]),
                             _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1])}}.f;
}
#define _mm512_fmadd_ps(a, b, c) pk_fmadd_ps(a, b, c)

/* The second operand where either is NaN, as with AVX2. */
EMULATED __m512 pk_max_ps(__m512 a, __m512 b) {
    pk_512 x = {a}, y = {b};
    return (pk_512){.half = {_mm256_max_ps(x.half[0], y.half[0]), _mm256_max_ps(x.half[1], y.half[1])}}.f;
}
#define _mm512_max_ps(a, b) pk_max_ps(a, b)

EMULATED __m512 pk_min_ps(__m512 a, __m512 b) {
    pk_512 x = {a}, y = {b};
    return (pk_512){.half = {_mm256_min_ps(x.half[0], y.half[0]), _mm256_min_ps(x.half[1], y.half[1])}}.f;
}
#define _mm512_min_ps(a, b) pk_min_ps(a, b)

/* The upper half of the constant is a number of fraction bits to keep, of which only 0 is known here; the lower one is
   as in AVX2's VROUNDPS. */
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(a, how)                                                        \
    __extension__({                                                                         \
        _Static_assert(((how) & 0xf0) == 0, "fraction bits are not emulated");              \
        pk_512 pk_x = {a};                                                                  \
        (pk_512){.half = {_mm256_round_ps(pk_x.half[0], how), _mm256_round_ps(pk_x.half[1], how)}}.f; \
    })

/* Bit n of a mask is lane n. */
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, how)                                                       \
    __extension__({                                                                         \
        pk_512 pk_x = {a}, pk_y = {b};                                                      \
        (__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(pk_x.half[0], pk_y.half[0], how)) |    \
                    _mm256_movemask_ps(_mm256_cmp_ps(pk_x.half[1], pk_y.half[1], how)) << 8); \
    })

/* x in the lanes of the mask, else `other` */
EMULATED __m512 pk_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) {
    pk_512 from = {x}, to = {other};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) to.lane[i] = from.lane[i];
    return to.f;
}
#define _mm512_mask_mov_ps(other, mask, x) pk_mask_mov_ps(other, mask, x)
#define _mm512_maskz_mov_ps(mask, x) pk_mask_mov_ps(_mm512_setzero_ps(), mask, x)

/* -- whole numbers ----------------------------------------------------------------------------------------------- */

EMULATED __m512i pk_set1_epi32(int x) {
    __m256i half = _mm256_set1_epi32(x);
    return (pk_512){.half_i = {half, half}}.i;
}
#define _mm512_set1_epi32(x) pk_set1_epi32(x)
#define _mm512_loadu_si512(p) ((__m512i) * (const pk_u32 *)(p))
#define _mm512_storeu_si512(p, x) ((void)(*(pk_u32 *)(p) = (pk_u32)(x)))
#define _mm512_and_si512(a, b) ((__m512i)((pk_u32)(a) & (pk_u32)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((pk_u32)(a) | (pk_u32)(b)))
#define _mm512_add_epi32(a, b) ((__m512i)((pk_u32)(a) + (pk_u32)(b)))
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(x, bits) _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits))

#define SHIFT(name)                                                                                          \
    EMULATED __m512i pk_##name(__m512i a, __m128i bits) {                                                    \
        pk_512 x = {.i = a};                                                                                 \
        return (pk_512){.half_i = {_mm256_##name(x.half_i[0], bits), _mm256_##name(x.half_i[1], bits)}}.i; \
    }
SHIFT(sll_epi32)
SHIFT(srl_epi32)
SHIFT(sra_epi32)
#undef SHIFT
#define _mm512_sll_epi32(x, bits) pk_sll_epi32(x, bits)
#define _mm512_srl_epi32(x, bits) pk_srl_epi32(x, bits)
#define _mm512_sra_epi32(x, bits) pk_sra_epi32(x, bits)

/* -- from one to the other --------------------------------------------------------------------------------------- */

#define _mm512_castps_si512(x) ((__m512i)(x))
#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_cvtepi32_ps(x) ((__m512)__builtin_convertvector((pk_s32)(x), pk_f32))
#define _mm512_cvtepu16_epi32(x) ((__m512i)__builtin_convertvector((pk_u16)(x), pk_u32))
#define _mm512_cvtepu8_epi32(x) ((__m512i)__builtin_convertvector((pk_u8)(x), pk_u32))
#define _mm512_cvtepi8_epi32(x) ((__m512i)__builtin_convertvector((pk_s8)(x), pk_s32))

/* In the current rounding mode, to nearest. */
EMULATED __m512i pk_cvtps_epi32(__m512 a) {
    pk_512 x = {a};
    return (pk_512){.half_i = {_mm256_cvtps_epi32(x.half[0]), _mm256_cvtps_epi32(x.half[1])}}.i;
}
#define _mm512_cvtps_epi32(x) pk_cvtps_epi32(x)

EMULATED __m512 pk_cvtph_ps(__m256i x) {
    return (pk_512){.half = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                             _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))}}.f;
}
#define _mm512_cvtph_ps(x) pk_cvtph_ps(x)

/* -- bfloat16 ---------------------------------------------------------------------------------------------------- */

/* VCVTNEPS2BF16: to nearest, ties to even; denormals to zero of their sign; NaN made quiet. */
static inline __m256i pk_cvtneps_pbh(__m512 x) {
    uint32_t from[16];
    uint16_t to[16];
    memcpy(from, &x, sizeof from);
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = from[i], size = bits & 0x7fffffff;
        if (size > 0x7f800000)
            to[i] = (uint16_t)(bits >> 16 | 0x40);
        else if (size < 0x00800000)
            to[i] = (uint16_t)(bits >> 16 & 0x8000);
        else
            to[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    __m256i all;
    memcpy(&all, to, sizeof all);
    return all;
}
#define _mm512_cvtneps_pbh(x) pk_cvtneps_pbh(x)

/* VDPBF16PS: the odd product is added first, then the even one, each rounded once. (It also takes denormals for zeros,
   which these tests do not meet.) */
EMULATED __m512 pk_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
    pk_512 to = {sum}, x = {.i = a}, y = {.i = b};
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
    for (int i = 0; i < 2; i++) {
        to.half[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x.half_i[i], odd)),
                                     _mm256_castsi256_ps(_mm256_and_si256(y.half_i[i], odd)), to.half[i]);
        to.half[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x.half_i[i], 16)),
                                     _mm256_castsi256_ps(_mm256_slli_epi32(y.half_i[i], 16)), to.half[i]);
    }
    return to.f;
}
#define _mm512_dpbf16_ps(sum, a, b) pk_dpbf16_ps(sum, (__m512i)(a), (__m512i)(b))

/* What the sources ask the compiler for. */
#define __AVX512F__ 1
#define __AVX512BF16__ 1

#endif
