// Products of quantized activations and packed weights.
#pragma once

#include "quantize.h"

namespace pagedlc {

// Rows multiplied together: their integer and float sums, of two vectors a row, should fit into the registers.
#if defined(PAGEDLC_AVX512)
constexpr int MOST_ROWS = 6;
#else
constexpr int MOST_ROWS = 3;
#endif

// out[r * stride .. + 2 * LANES) for rows `row + r`, r < R: their dot products with the outputs of `panel` from
// `output` on. The sum goes over the groups in order whatever R is, so a row's numbers do not depend on the rows
// computed with it.
template <int R>
static PAGEDLC_ONCE void multiply_rows(const QuantizedRows& x, int64_t row, const uint8_t* panel, int output,
                                       float* out, int64_t stride) {
    int64_t groups = x.groups();
    const int8_t* values = x.values + row * x.width;
    const float* scales = x.scales + row * groups;
    const int32_t* corrections = x.corrections + row * groups;
    Floats total[R][2] = {};
    for (int64_t g = 0; g < groups; g++, panel += UNIT_BYTES) {
        Ints part[R][2];
        for (int r = 0; r < R; r++) part[r][0] = part[r][1] = ints(corrections[r * groups + g]);
        const uint8_t* weights = panel + 2 * PANEL + 4 * output;
#pragma GCC unroll 8
        for (int i = 0; i < GROUP / 4; i++, weights += 4 * PANEL) {
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, values + r * x.width + g * GROUP + 4 * i, 4);
                part[r][0] = add_dot4(part[r][0], weights, four);
                part[r][1] = add_dot4(part[r][1], weights + 4 * LANES, four);
            }
        }
        Floats scale[2] = {load_scales(panel + 2 * output), load_scales(panel + 2 * (output + LANES))};
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
        case 3: return f(Count<3>{});
#if defined(PAGEDLC_AVX512)
        case 4: return f(Count<4>{});
        case 5: return f(Count<5>{});
        case 6: return f(Count<6>{});
#endif
    }
}

// All outputs of a panel for `count` rows, at most MOST_ROWS.
static inline void multiply(const QuantizedRows& x, int64_t row, int count, const uint8_t* panel, float* out,
                            int64_t stride) {
    with_count(count, [&](auto rows) {
        for (int output = 0; output < PANEL; output += 2 * LANES)
            multiply_rows<decltype(rows)::value>(x, row, panel, output, out + output, stride);
    });
}

}  // namespace pagedlc
