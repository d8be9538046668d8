// What Python hands over; pagedlc_engine/native/library.py has the same structures.
#pragma once

#include <cstdint>

namespace pagedlc {

// One layer's weights. Matrices are packed; what a model does not have is null.
struct Layer {
    const float* attention_norm;
    const uint8_t* qkv;  // rows of query, key and value heads
    const float* qkv_bias;
    const float* query_norm;
    const float* key_norm;
    const uint8_t* output;
    const float* output_bias;
    const float* mlp_norm;
    const uint8_t* gate_up;  // PANEL rows of gate and PANEL rows of up in turns
    const float* gate_up_bias;
    const uint8_t* down;
    const float* down_bias;
    int64_t window;  // tokens seen, itself included; 0 for all
};

struct Model {
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size, num_layers;
    float eps;
    float rope_amplitude;
    const float* rope_frequencies;  // [head_dim / 2]
    const float* norm;
    const uint8_t* head;
    const Layer* layers;
};

// The tokens of all requests of a step, one request after the other.
//
// A layer's cache is [blocks, kv heads, 2, block_size * head_dim]: a block's keys lie dimension by dimension, its
// values token by token.
struct Step {
    int64_t num_tokens, num_requests, block_size, max_blocks;
    const int64_t* positions;      // [num_tokens]
    const int64_t* slots;          // [num_tokens]: block * block_size + offset
    const int64_t* first_tokens;   // [num_requests + 1]: where each request's tokens begin
    const int32_t* block_tables;   // [num_requests, max_blocks]
    float* const* caches;          // [layers]
    float* stream;                 // [num_tokens, hidden_size]: embeddings, then the result
    char* scratch;                 // scratch_bytes() of it
};

}  // namespace pagedlc
