// The functions that Python calls. All memory is Python's; `team` comes from pagedlc_team().
#include "forward.h"

using namespace pagedlc;

extern "C" {

// Whether this build multiplies 8-bit integers by instructions made for it.
int pagedlc_is_fast() {
#if defined(PAGEDLC_AVX512) || defined(PAGEDLC_AVX2)
    return 1;
#else
    return 0;
#endif
}

// Threads for models of up to `layers` layers.
void* pagedlc_team(int threads, int64_t layers) { return new Team(threads, Forward::phases(layers)); }

void pagedlc_dismiss(void* team) { delete static_cast<Team*>(team); }

int64_t pagedlc_packed_bytes(int64_t outputs, int64_t width) { return divide_up(outputs, PANEL) * panel_bytes(width); }

// Packs a float32 weight [outputs, width].
void pagedlc_pack(void* team, const float* weight, int64_t outputs, int64_t width, uint8_t* packed) {
    static_cast<Team*>(team)->run([=](Walk& walk) {
        walk.share(divide_up(outputs, PANEL),
                   [=](int64_t panel) { pack_panel(weight, outputs, width, panel, packed); });
    });
}

int64_t pagedlc_scratch_bytes(const Model* model, int64_t tokens) { return Scratch::bytes(*model, tokens); }

void pagedlc_forward(void* team, const Model* model, const Step* step) {
    static_cast<Team*>(team)->run(Forward(*model, *step));
}

// `scratch` as for a step of `rows` tokens.
void pagedlc_logits(void* team, const Model* model, const float* hidden, int64_t rows, char* scratch, float* logits) {
    QuantizedRows quantized = QuantizedRows::take(scratch, rows, model->hidden_size);
    static_cast<Team*>(team)->run(Logits{*model, hidden, rows, quantized, logits});
}
}
