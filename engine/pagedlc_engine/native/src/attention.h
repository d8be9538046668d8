// Attention over the paged cache: softmax piece by piece over tiles of TILE keys, counted from a request's first token
// (online softmax, Milakov and Gimelshein 2018; tiles as in FlashAttention, Dao et al. 2022).
//
// A query's numbers depend on its own keys alone: a tile or key that it does not see adds exact zeros, whichever
// queries it is computed with.
#pragma once

#include "model.h"
#include "product.h"
#include "sizes.h"

namespace pagedlc {

constexpr int TILE = 64;
constexpr int TILE_VECTORS = TILE / LANES;
constexpr float LOWEST = -1e30f;

// Vectors computed together for each of MOST_ROWS queries.
#if defined(PAGEDLC_AVX512)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif

// Queries of one key head of one request, and what they have found so far.
struct Queries {
    int count = 0;
    const float* query[MOST_QUERIES];
    int64_t begin[MOST_QUERIES], end[MOST_QUERIES];  // keys seen
    float top[MOST_QUERIES];
    Floats total[MOST_QUERIES];
    alignas(64) float out[MOST_QUERIES * MOST_HEAD_DIM];

    void add(const float* from, int64_t key_begin, int64_t key_end, int64_t head_dim) {
        query[count] = from;
        begin[count] = key_begin;
        end[count] = key_end;
        top[count] = LOWEST;
        total[count] = floats(0.0f);
        std::memset(out + count * head_dim, 0, sizeof(float) * head_dim);
        count++;
    }
};

// Keys and values of one head in one tile, LANES keys at a time. `keys` is how many some query may see.
struct TileKeys {
    const float* key[TILE_VECTORS];    // + d * block_size: dimension d of LANES keys
    const float* value[TILE_VECTORS];  // + i * head_dim: value of key i
    int keys;
    int64_t first;
};

static inline TileKeys find_tile(const Step& step, const Model& model, const float* cache, const int32_t* table,
                                 int64_t head, int64_t tile, int64_t end) {
    int64_t half = step.block_size * model.head_dim;
    TileKeys found{{}, {}, static_cast<int>(end - tile * TILE < TILE ? end - tile * TILE : TILE), tile * TILE};
    for (int i = 0; i < TILE_VECTORS; i++) {
        // Past the last key any address will do: what is computed there is masked.
        int64_t at = i * LANES < found.keys ? found.first + i * LANES : found.first;
        const float* block = cache + (table[at / step.block_size] * model.num_kv_heads + head) * 2 * half;
        found.key[i] = block + at % step.block_size;
        found.value[i] = block + half + at % step.block_size * model.head_dim;
    }
    return found;
}

// score[r] of VECTORS vectors of keys from vector `at` on.
template <int R>
static inline void score_keys(const Queries& rows, int from, const TileKeys& tile, int64_t head_dim,
                              int64_t block_size, int at, Floats (*score)[TILE_VECTORS]) {
    Floats sums[R][VECTORS] = {};
    for (int64_t d = 0; d < head_dim; d++) {
        Floats key[VECTORS];
        for (int i = 0; i < VECTORS; i++) key[i] = load<Floats>(tile.key[at + i] + d * block_size);
        for (int r = 0; r < R; r++) {
            Floats query = floats(rows.query[from + r][d]);
            for (int i = 0; i < VECTORS; i++) sums[r][i] = fma(query, key[i], sums[r][i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++) score[r][at + i] = sums[r][i];
}

// weights[i] = e^(score - top) of query i's keys, 0 for those it does not see; factors[i] brings old sums to the new
// top.
template <int R>
static inline void weigh_keys(Queries& rows, int from, const TileKeys& tile, int64_t head_dim, int64_t block_size,
                              float (*weights)[TILE], float* factors) {
    Floats score[R][TILE_VECTORS] = {};
    for (int at = 0; at < TILE_VECTORS && at * LANES < tile.keys; at += VECTORS)
        score_keys<R>(rows, from, tile, head_dim, block_size, at, score);
    Ints counted;
    for (int i = 0; i < LANES; i++) counted[i] = i;
    for (int r = 0; r < R; r++) {
        Ints begin = ints(static_cast<int32_t>(rows.begin[from + r] - tile.first));
        Ints end = ints(static_cast<int32_t>(rows.end[from + r] - tile.first));
        Ints seen[TILE_VECTORS];
        Floats top = floats(LOWEST);
        for (int i = 0; i < TILE_VECTORS; i++) {
            Ints place = counted + i * LANES;
            seen[i] = (place >= begin) & (place < end);
            score[r][i] = seen[i] ? score[r][i] : floats(LOWEST);
            top = larger(top, score[r][i]);
        }
        float before = rows.top[from + r], now = largest(top);
        now = now > before ? now : before;
        factors[r] = exponential(floats(before - now))[0];
        Floats total = {};
        for (int i = 0; i < TILE_VECTORS; i++) {
            Floats weight = seen[i] ? exponential(score[r][i] - now) : floats(0.0f);
            store(weights[r] + i * LANES, weight);
            total += weight;
        }
        rows.total[from + r] = fma(rows.total[from + r], floats(factors[r]), total);
        rows.top[from + r] = now;
    }
}

// Adds the weighted values of a tile to the sums of R queries, V vectors of dimensions from `d` on.
template <int R, int V>
static inline void add_values(Queries& rows, int from, const TileKeys& tile, int64_t head_dim, int64_t d,
                              const float (*weights)[TILE], const float* factors) {
    Floats out[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            out[r][v] = load<Floats>(rows.out + (from + r) * head_dim + d + v * LANES) * factors[r];
    for (int j = 0; j < tile.keys; j++) {
        const float* from_value = tile.value[j / LANES] + j % LANES * head_dim + d;
        Floats value[V];
        for (int v = 0; v < V; v++) value[v] = load<Floats>(from_value + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) out[r][v] = fma(floats(weights[r][j]), value[v], out[r][v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(rows.out + (from + r) * head_dim + d + v * LANES, out[r][v]);
}

template <int R>
static PAGEDLC_ONCE void attend_tile(Queries& rows, int from, const TileKeys& tile, int64_t head_dim,
                                     int64_t block_size) {
    float weights[R][TILE], factors[R];
    weigh_keys<R>(rows, from, tile, head_dim, block_size, weights, factors);
    int64_t d = 0;
    for (; d + VECTORS * LANES <= head_dim; d += VECTORS * LANES)
        add_values<R, VECTORS>(rows, from, tile, head_dim, d, weights, factors);
    for (; d < head_dim; d += 2 * LANES) add_values<R, 2>(rows, from, tile, head_dim, d, weights, factors);
}

// Answers all queries; the keys are read once for MOST_QUERIES of them.
static inline void attend(Queries& rows, const Step& step, const Model& model, const float* cache,
                          const int32_t* table, int64_t head) {
    int64_t begin = rows.begin[0], end = rows.end[0];
    for (int r = 1; r < rows.count; r++) {
        begin = rows.begin[r] < begin ? rows.begin[r] : begin;
        end = rows.end[r] > end ? rows.end[r] : end;
    }
    for (int64_t t = begin / TILE; t * TILE < end; t++) {
        for (int from = 0; from < rows.count; from += MOST_ROWS) {
            int count = rows.count - from < MOST_ROWS ? rows.count - from : MOST_ROWS;
            // Later queries see later keys: the last one of these decides how far to go.
            int64_t last = rows.end[from + count - 1];
            if (last <= t * TILE || rows.begin[from] >= (t + 1) * TILE) continue;
            TileKeys tile = find_tile(step, model, cache, table, head, t, last);
            with_count(count, [&](auto number) {
                attend_tile<decltype(number)::value>(rows, from, tile, model.head_dim, step.block_size);
            });
        }
    }
    for (int r = 0; r < rows.count; r++) {
        float total = sum(rows.total[r]);
        float* out = rows.out + r * model.head_dim;
        for (int64_t d = 0; d < model.head_dim; d += LANES) store(out + d, load<Floats>(out + d) / total);
    }
}

}  // namespace pagedlc
