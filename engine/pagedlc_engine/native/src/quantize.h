// Numbers as 8-bit integers with one scale per GROUP of them, for weights and for activations.
#pragma once

#include "simd.h"
#include "sizes.h"

namespace pagedlc {

constexpr int LEVELS = 127;  // integer steps on either side of zero
constexpr int UNIT_BYTES = PANEL * 2 + PANEL * GROUP;  // scales and weights of one panel and one group

// Rows of quantized activations. A correction is what a group's sum of products starts with, see WEIGHT_ZERO.
struct QuantizedRows {
    int8_t* values;
    float* scales;
    int32_t* corrections;
    int64_t width;

    int64_t groups() const { return width / GROUP; }
    static int64_t bytes(int64_t rows, int64_t width) { return rows * (width + width / GROUP * 8); }

    // Rows laid out in `memory`, which is moved past them.
    static QuantizedRows take(char*& memory, int64_t rows, int64_t width) {
        QuantizedRows made{reinterpret_cast<int8_t*>(memory), nullptr, nullptr, width};
        made.scales = reinterpret_cast<float*>(memory + rows * width);
        made.corrections = reinterpret_cast<int32_t*>(made.scales + rows * made.groups());
        memory += bytes(rows, width);
        return made;
    }
};

// Quantizes x[0 .. GROUP) into one group of a row. A number that is not finite makes the whole group so.
static inline void quantize_group(const float* x, const QuantizedRows& rows, int64_t row, int64_t group) {
    // Without their signs floats are ordered like integers, NaN above all.
    Ints sizes = {};
    for (int i = 0; i < GROUP; i += LANES) sizes = larger(sizes, load<Ints>(x + i) & 0x7FFFFFFF);
    int32_t bits = largest(sizes);
    float top;
    std::memcpy(&top, &bits, 4);
    Floats inverse = floats(top > 0 ? LEVELS / top : 0.0f);
    int8_t* out = rows.values + row * rows.width + group * GROUP;
    Ints total = {};
    for (int i = 0; i < GROUP; i += LANES) {
        Ints steps = (Ints)fma(load<Floats>(x + i), inverse, floats(ROUND)) - (Ints)floats(ROUND);
        store(out + i, __builtin_convertvector(steps, Bytes));
        total += steps;
    }
    rows.scales[row * rows.groups() + group] = top / LEVELS;
    rows.corrections[row * rows.groups() + group] = -WEIGHT_ZERO * sum(total);
}

// What RMS norm multiplies x[0 .. width) with, before its weights; width is a multiple of GROUP.
static inline float norm_factor(const float* x, int64_t width, float eps) {
    Floats squares[2] = {};
    for (int64_t i = 0; i < width; i += 2 * LANES)
        for (int half = 0; half < 2; half++) {
            Floats v = load<Floats>(x + i + half * LANES);
            squares[half] = fma(v, v, squares[half]);
        }
    return 1.0f / __builtin_sqrtf(sum(squares[0] + squares[1]) / width + eps);
}

static inline void norm_part(const float* x, float factor, const float* gain, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load<Floats>(x + i) * factor * load<Floats>(gain + i));
}

// RMS norm with weights `gain`, into `out`.
static inline void rms_norm(const float* x, const float* gain, int64_t width, float eps, float* out) {
    norm_part(x, norm_factor(x, width, eps), gain, width, out);
}

// The same, quantized into `row`.
static inline void quantize_normed(const float* x, const float* gain, float eps, const QuantizedRows& rows,
                                   int64_t row) {
    float factor = norm_factor(x, rows.width, eps), part[GROUP];
    for (int64_t g = 0; g < rows.groups(); g++) {
        norm_part(x + g * GROUP, factor, gain + g * GROUP, GROUP, part);
        quantize_group(part, rows, row, g);
    }
}

// A packed weight is panels of PANEL outputs. A panel is one unit per group of inputs: PANEL bfloat16 scales, then for
// every four inputs PANEL times four weights.
static inline int64_t panel_bytes(int64_t width) { return width / GROUP * UNIT_BYTES; }

static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

// The next one not below x, so that no weight takes more than LEVELS steps.
static inline uint16_t bfloat16_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0xFFFF) >> 16);
}

static inline Floats load_scales(const uint8_t* from) {
    return (Floats)(__builtin_convertvector(load<Shorts>(from), Ints) << 16);
}

// Packs GROUP weights of one output into a unit.
static inline void pack_group(const float* x, int output, uint8_t* unit) {
    float top = 0.0f;
    for (int i = 0; i < GROUP; i++) top = __builtin_fmaxf(top, __builtin_fabsf(x[i]));
    uint16_t scale = bfloat16_above(top / LEVELS);
    float inverse = top > 0 ? 1.0f / from_bfloat16(scale) : 0.0f;
    std::memcpy(unit + 2 * output, &scale, 2);
    for (int i = 0; i < GROUP; i++) {
        int step = static_cast<int>(__builtin_rintf(x[i] * inverse)) + WEIGHT_ZERO;
        unit[2 * PANEL + i / 4 * 4 * PANEL + 4 * output + i % 4] = static_cast<uint8_t>(step);
    }
}

// Packs panel `panel` of `weight` [outputs, width]; outputs past the end become zeros.
static inline void pack_panel(const float* weight, int64_t outputs, int64_t width, int64_t panel, uint8_t* packed) {
    const float zeros[GROUP] = {};
    for (int64_t g = 0; g < width / GROUP; g++)
        for (int o = 0; o < PANEL; o++) {
            int64_t output = panel * PANEL + o;
            const float* x = output < outputs ? weight + output * width + g * GROUP : zeros;
            pack_group(x, o, packed + panel * panel_bytes(width) + g * UNIT_BYTES);
        }
}

}  // namespace pagedlc
