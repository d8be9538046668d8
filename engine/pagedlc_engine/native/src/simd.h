// Vectors as wide as the CPU's registers. The compiler maps arithmetic on them to instructions; the few operations that
// it does not find by itself are spelled out. Within one build an operation gives the same bits everywhere.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Of a function that is long and called in several places: inlined there it would double the time this compiles.
#define PAGEDLC_ONCE __attribute__((noinline))

namespace pagedlc {

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define PAGEDLC_AVX512
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define PAGEDLC_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class Vector>
static inline Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class Vector>
static inline void store(void* to, Vector v) {
    std::memcpy(to, &v, sizeof v);
}

static inline Floats floats(float x) { return Floats{} + x; }
static inline Ints ints(int32_t x) { return Ints{} + x; }
static inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// a * b + c, rounded once where the CPU can.
static inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(PAGEDLC_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PAGEDLC_AVX2)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
static inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }

// All lanes made one, halves on halves, always in this order.
template <class Number, class Vector, class Join>
static inline Number reduce(Vector v, Join join) {
    Number part[LANES];
    store(part, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] = join(part[i], part[i + width]);
    return part[0];
}

static inline float sum(Floats v) {
#if defined(PAGEDLC_AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#else
    return reduce<float>(v, [](float a, float b) { return a + b; });
#endif
}

static inline int32_t sum(Ints v) {
#if defined(PAGEDLC_AVX512)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    return reduce<int32_t>(v, [](int32_t a, int32_t b) { return a + b; });
#endif
}

static inline float largest(Floats v) {
#if defined(PAGEDLC_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return reduce<float>(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

static inline int32_t largest(Ints v) {
#if defined(PAGEDLC_AVX512)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    return reduce<int32_t>(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
#endif
}

// Adding this to a number leaves no place for a fraction: the low bits then hold the nearest integer.
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23

// e to the power of x: 2^n times the power series of the rest, |rest| <= ln(2) / 2. Relative error about 1e-7.
static inline Floats exponential(Floats x) {
    constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    x = smaller(larger(x, floats(-87.0f)), floats(88.0f));
    Floats shifted = fma(x, floats(LOG2_E), floats(ROUND));
    Floats n = shifted - ROUND;
    Floats rest = fma(n, floats(-LN2_LOW), fma(n, floats(-LN2_HIGH), x));
    Floats series = floats(1.0f / 5040);
    for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        series = fma(series, rest, floats(factor));
    return series * (Floats)(((Ints)shifted << 23) + (127 << 23));
}

// Where the CPU multiplies unsigned by signed bytes (VNNI), weights are stored as unsigned numbers and WEIGHT_ZERO
// stands for zero; whoever starts a sum takes WEIGHT_ZERO times the sum of the other factors off.
#if defined(PAGEDLC_AVX512) || (defined(PAGEDLC_AVX2) && defined(__AVXVNNI__))
constexpr int WEIGHT_ZERO = 128;
#else
constexpr int WEIGHT_ZERO = 0;
#endif

// Lane i gains the dot product of weights[4 i .. 4 i + 3] and the four numbers packed in x.
static inline Ints add_dot4(Ints total, const uint8_t* weights, int32_t x) {
#if defined(PAGEDLC_AVX512)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, load<__m512i>(weights), _mm512_set1_epi32(x));
#elif defined(PAGEDLC_AVX2) && defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, load<__m256i>(weights), _mm256_set1_epi32(x));
#elif defined(PAGEDLC_AVX2)
    // |w| times (x with w's sign): a pair of products of numbers up to 127 fits into 16 bits.
    __m256i w = load<__m256i>(weights);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(x), w));
    return total + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    Ints w = load<Ints>(weights);
    int8_t factor[4];
    std::memcpy(factor, &x, 4);
    // Byte i of every lane, with its sign.
    for (int i = 0; i < 4; i++) total += (w << (24 - 8 * i) >> 24) * factor[i];
    return total;
#endif
}

}  // namespace pagedlc
