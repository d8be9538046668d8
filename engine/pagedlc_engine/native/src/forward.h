// A step through all layers.
#pragma once

#include <cmath>

#include "attention.h"
#include "team.h"

namespace pagedlc {

constexpr int64_t ROW_BLOCK = 16 * MOST_ROWS;  // rows that one thread multiplies with the same weights
constexpr int64_t ROWS_AT_ONCE = 8;            // rows normed by one thread in one go

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory of a step.
struct Scratch {
    QuantizedRows normed, heads, inner;
    float* queries;    // [tokens, num_heads * head_dim]
    float* rotations;  // [tokens, 2, head_dim / 2]: cosines, sines

    static int64_t bytes(const Model& m, int64_t tokens) {
        int64_t heads = m.num_heads * m.head_dim;
        return QuantizedRows::bytes(tokens, m.hidden_size) + QuantizedRows::bytes(tokens, heads) +
               QuantizedRows::bytes(tokens, m.intermediate_size) + tokens * (heads + m.head_dim) * sizeof(float);
    }

    Scratch(const Model& m, int64_t tokens, char* memory)
        : normed(QuantizedRows::take(memory, tokens, m.hidden_size)),
          heads(QuantizedRows::take(memory, tokens, m.num_heads * m.head_dim)),
          inner(QuantizedRows::take(memory, tokens, m.intermediate_size)),
          queries(reinterpret_cast<float*>(memory)),
          rotations(queries + tokens * m.num_heads * m.head_dim) {}
};

// Calls f(row, count, chunk) for all rows, MOST_ROWS at a time, and all chunks: on all threads.
template <class F>
static inline void share_products(Walk& walk, int64_t rows, int64_t chunks, F f) {
    // The blocks of a chunk follow each other, so that its weights stay near.
    int64_t blocks = divide_up(rows, ROW_BLOCK);
    walk.share(blocks * chunks, [&](int64_t item) {
        int64_t chunk = item / blocks, first = item % blocks * ROW_BLOCK;
        int64_t end = least(first + ROW_BLOCK, rows);
        for (int64_t row = first; row < end; row += MOST_ROWS)
            f(row, static_cast<int>(least(MOST_ROWS, end - row)), chunk);
    });
}

template <class F>
static inline void share_rows(Walk& walk, int64_t rows, F f) {
    walk.share(divide_up(rows, ROWS_AT_ONCE), [&](int64_t item) {
        for (int64_t row = item * ROWS_AT_ONCE; row < least(rows, (item + 1) * ROWS_AT_ONCE); row++) f(row);
    });
}

class Forward {
public:
    Forward(const Model& model, const Step& step)
        : m(model),
          s(step),
          scratch(model, step.num_tokens, step.scratch),
          group(model.num_heads / model.num_kv_heads) {}

    // The final norm's output takes the place of the stream.
    void operator()(Walk& walk) const {
        share_rows(walk, s.num_tokens, [&](int64_t row) { find_rotations(row); });
        for (int64_t i = 0; i < m.num_layers; i++) {
            const Layer& layer = m.layers[i];
            norm(walk, layer.attention_norm);
            share_products(walk, s.num_tokens, m.num_heads + 2 * m.num_kv_heads,
                           [&](int64_t row, int count, int64_t head) {
                               make_heads(layer, s.caches[i], row, count, head);
                           });
            attention(walk, layer, s.caches[i]);
            add_to_stream(walk, scratch.heads, layer.output, layer.output_bias);
            norm(walk, layer.mlp_norm);
            share_products(walk, s.num_tokens, m.intermediate_size / PANEL,
                           [&](int64_t row, int count, int64_t panel) { make_inner(layer, row, count, panel); });
            add_to_stream(walk, scratch.inner, layer.down, layer.down_bias);
        }
        share_rows(walk, s.num_tokens, [&](int64_t row) {
            float* x = s.stream + row * m.hidden_size;
            rms_norm(x, m.norm, m.hidden_size, m.eps, x);
        });
    }

    static int phases(int64_t layers) { return static_cast<int>(7 * layers + 2); }

private:
    void find_rotations(int64_t row) const {
        int64_t pairs = m.head_dim / 2;
        float* out = scratch.rotations + row * m.head_dim;
        for (int64_t i = 0; i < pairs; i++) {
            float angle = static_cast<float>(s.positions[row]) * m.rope_frequencies[i];
            out[i] = std::cos(angle) * m.rope_amplitude;
            out[pairs + i] = std::sin(angle) * m.rope_amplitude;
        }
    }

    void norm(Walk& walk, const float* gain) const {
        share_rows(walk, s.num_tokens, [&](int64_t row) {
            quantize_normed(s.stream + row * m.hidden_size, gain, m.eps, scratch.normed, row);
        });
    }

    // Multiplies, norms and rotates one head of some rows, and puts it where attention looks for it.
    void make_heads(const Layer& layer, float* cache, int64_t row, int count, int64_t head) const {
        int64_t dim = m.head_dim;
        float out[MOST_ROWS * MOST_HEAD_DIM];
        for (int64_t at = 0; at < dim; at += PANEL) {
            int64_t panel = (head * dim + at) / PANEL;
            multiply(scratch.normed, row, count, layer.qkv + panel * panel_bytes(m.hidden_size), out + at, dim);
        }
        for (int r = 0; r < count; r++) {
            float* x = out + r * dim;
            if (layer.qkv_bias) add(x, layer.qkv_bias + head * dim, dim);
            if (head < m.num_heads) {
                turn(x, layer.query_norm, row + r);
                float* query = scratch.queries + ((row + r) * m.num_heads + head) * dim;
                float scale = 1.0f / std::sqrt(static_cast<float>(dim));
                for (int64_t d = 0; d < dim; d++) query[d] = x[d] * scale;
            } else if (head < m.num_heads + m.num_kv_heads) {
                turn(x, layer.key_norm, row + r);
                float* key = block_of(cache, row + r, head - m.num_heads) + s.slots[row + r] % s.block_size;
                for (int64_t d = 0; d < dim; d++) key[d * s.block_size] = x[d];
            } else {
                float* block = block_of(cache, row + r, head - m.num_heads - m.num_kv_heads);
                std::memcpy(block + (s.block_size + s.slots[row + r] % s.block_size) * dim, x, sizeof(float) * dim);
            }
        }
    }

    float* block_of(float* cache, int64_t row, int64_t head) const {
        return cache + (s.slots[row] / s.block_size * m.num_kv_heads + head) * 2 * s.block_size * m.head_dim;
    }

    static void add(float* x, const float* more, int64_t count) {
        for (int64_t i = 0; i < count; i += LANES) store(x + i, load<Floats>(x + i) + load<Floats>(more + i));
    }

    // Norm (if the model has one) and rotary embedding of a query or key head.
    void turn(float* x, const float* gain, int64_t row) const {
        if (gain) rms_norm(x, gain, m.head_dim, m.eps, x);
        int64_t pairs = m.head_dim / 2;
        const float* rotation = scratch.rotations + row * m.head_dim;
        for (int64_t i = 0; i < pairs; i += LANES) {
            Floats cosine = load<Floats>(rotation + i), sine = load<Floats>(rotation + pairs + i);
            Floats a = load<Floats>(x + i), b = load<Floats>(x + pairs + i);
            store(x + i, fma(a, cosine, -(b * sine)));
            store(x + pairs + i, fma(b, cosine, a * sine));
        }
    }

    void attention(Walk& walk, const Layer& layer, const float* cache) const {
        int64_t tokens = MOST_QUERIES / group;
        int64_t pieces = 0;
        for (int64_t r = 0; r < s.num_requests; r++) pieces += divide_up(length(r), tokens);
        walk.share(pieces * m.num_kv_heads, [&](int64_t item) {
            int64_t piece = item / m.num_kv_heads, request = 0;
            for (; piece >= divide_up(length(request), tokens); request++) piece -= divide_up(length(request), tokens);
            int64_t first = s.first_tokens[request] + piece * tokens;
            int64_t end = least(first + tokens, s.first_tokens[request + 1]);
            attend_to(layer, cache, request, first, end, item % m.num_kv_heads);
        });
    }

    int64_t length(int64_t request) const { return s.first_tokens[request + 1] - s.first_tokens[request]; }

    // Tokens [first, end) of a request, the query heads of one key head.
    void attend_to(const Layer& layer, const float* cache, int64_t request, int64_t first, int64_t end,
                   int64_t head) const {
        Queries rows;
        for (int64_t row = first; row < end; row++)
            for (int64_t i = 0; i < group; i++) {
                int64_t seen = s.positions[row] + 1;
                int64_t begin = layer.window && layer.window < seen ? seen - layer.window : 0;
                const float* query = scratch.queries + (row * m.num_heads + head * group + i) * m.head_dim;
                rows.add(query, begin, seen, m.head_dim);
            }
        attend(rows, s, m, cache, s.block_tables + request * s.max_blocks, head);
        for (int r = 0; r < rows.count; r++)
            for (int64_t d = 0; d < m.head_dim; d += GROUP) {
                int64_t at = (head * group + r % group) * m.head_dim + d;
                quantize_group(rows.out + r * m.head_dim + d, scratch.heads, first + r / group, at / GROUP);
            }
    }

    // silu(gate) * up of PANEL places of some rows.
    void make_inner(const Layer& layer, int64_t row, int count, int64_t panel) const {
        float out[MOST_ROWS * 2 * PANEL];
        const uint8_t* weights = layer.gate_up + 2 * panel * panel_bytes(m.hidden_size);
        for (int i = 0; i < 2; i++)
            multiply(scratch.normed, row, count, weights + i * panel_bytes(m.hidden_size), out + i * PANEL, 2 * PANEL);
        for (int r = 0; r < count; r++) {
            float* x = out + r * 2 * PANEL;
            if (layer.gate_up_bias) add(x, layer.gate_up_bias + 2 * panel * PANEL, 2 * PANEL);
            for (int i = 0; i < PANEL; i += LANES) {
                Floats gate = load<Floats>(x + i), up = load<Floats>(x + PANEL + i);
                store(x + i, gate / (exponential(-gate) + 1.0f) * up);
            }
            quantize_group(x, scratch.inner, row + r, panel);
        }
    }

    void add_to_stream(Walk& walk, const QuantizedRows& x, const uint8_t* weight, const float* bias) const {
        share_products(walk, s.num_tokens, m.hidden_size / PANEL, [&](int64_t row, int count, int64_t panel) {
            float out[MOST_ROWS * PANEL];
            multiply(x, row, count, weight + panel * panel_bytes(x.width), out, PANEL);
            for (int r = 0; r < count; r++) {
                float* stream = s.stream + (row + r) * m.hidden_size + panel * PANEL;
                if (bias) add(stream, bias + panel * PANEL, PANEL);
                add(stream, out + r * PANEL, PANEL);
            }
        });
    }

    const Model& m;
    const Step& s;
    const Scratch scratch;
    const int64_t group;
};

// Logits [rows, vocab_size] of hidden vectors [rows, hidden_size].
struct Logits {
    const Model& m;
    const float* hidden;
    int64_t rows;
    const QuantizedRows quantized;
    float* out;

    void operator()(Walk& walk) const {
        share_rows(walk, rows, [&](int64_t row) {
            for (int64_t g = 0; g < quantized.groups(); g++)
                quantize_group(hidden + row * m.hidden_size + g * GROUP, quantized, row, g);
        });
        share_products(walk, rows, divide_up(m.vocab_size, PANEL), [&](int64_t row, int count, int64_t panel) {
            float tile[MOST_ROWS * PANEL];
            multiply(quantized, row, count, m.head + panel * panel_bytes(m.hidden_size), tile, PANEL);
            int64_t outputs = least(PANEL, m.vocab_size - panel * PANEL);
            for (int r = 0; r < count; r++)
                std::memcpy(out + (row + r) * m.vocab_size + panel * PANEL, tile + r * PANEL, sizeof(float) * outputs);
        });
    }
};

}  // namespace pagedlc
