// Products of quantized activations and packed weights.
#pragma once

#include "quantize.h"

namespace pagedlc {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;  // integer and float sums of two vectors a row then take 24 of the 32 registers
#else
constexpr int MOST_ROWS = 2;
#endif

// out[i * stride .. + PANEL) for rows `row + i`, i < R: their dot products with one panel. The sum goes over the groups
// in order whatever R is, so a row's numbers do not depend on the rows computed with it.
template <int R>
static inline void multiply_rows(const QuantizedRows& x, int64_t row, const uint8_t* panel, float* out,
                                 int64_t stride) {
    int64_t groups = x.groups();
    const int8_t* values = x.values + row * x.width;
    const float* scales = x.scales + row * groups;
    const int32_t* corrections = x.corrections + row * groups;
    Floats total[R][2] = {};
    for (int64_t g = 0; g < groups; g++, panel += UNIT_BYTES) {
        Ints part[R][2];
        for (int r = 0; r < R; r++) part[r][0] = part[r][1] = ints(corrections[r * groups + g]);
        const uint8_t* weights = panel + 2 * PANEL;
#pragma GCC unroll 8
        for (int i = 0; i < GROUP / 4; i++, weights += 4 * PANEL) {
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, values + r * x.width + g * GROUP + 4 * i, 4);
                part[r][0] = add_dot4(part[r][0], weights, four);
                part[r][1] = add_dot4(part[r][1], weights + 4 * LANES, four);
            }
        }
        Floats scale[2] = {load_scales(panel), load_scales(panel + 2 * LANES)};
        for (int r = 0; r < R; r++) {
            Floats own = floats(scales[r * groups + g]);
            for (int half = 0; half < 2; half++)
                total[r][half] = fma(to_floats(part[r][half]), scale[half] * own, total[r][half]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(out + r * stride + half * LANES, total[r][half]);
}

// Calls f with `count`, 1 to MOST_ROWS, as a constant.
template <int R>
struct Count {
    static constexpr int value = R;
};

template <class F>
static inline void with_count(int count, F f) {
    switch (count) {
        case 1: return f(Count<1>{});
        case 2: return f(Count<2>{});
#if defined(__AVX512F__)
        case 3: return f(Count<3>{});
        case 4: return f(Count<4>{});
        case 5: return f(Count<5>{});
        case 6: return f(Count<6>{});
#endif
    }
}

// The same for `count` rows, at most MOST_ROWS.
static inline void multiply(const QuantizedRows& x, int64_t row, int count, const uint8_t* panel, float* out,
                            int64_t stride) {
    with_count(count, [&](auto rows) { multiply_rows<decltype(rows)::value>(x, row, panel, out, stride); });
}

}  // namespace pagedlc
