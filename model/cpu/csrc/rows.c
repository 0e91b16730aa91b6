/* What is done to one row: embedding, norms, rotation, the cache's K and V, the gate. */

#include <math.h>

#include "pk.h"

void embed_row(const pk_model *model, int64_t id, float *out) {
    const size_t start = (size_t)id * model->hidden;
#if PK_BF16
    const bf16 *row = (const bf16 *)model->embedding + start;
    for (int i = 0; i < model->hidden; i += LANES) vf_store(out + i, vf_from_bf16(row + i));
#else
    memcpy(out, (const float *)model->embedding + start, sizeof(float) * (size_t)model->hidden);
#endif
}

INLINE vf inverse_norm(const float *x, int size, float eps) {
    vf squares = vf_zero();
    for (int i = 0; i < size; i += LANES) squares = vf_fma(vf_load(x + i), vf_load(x + i), squares);
    return vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)size + eps));
}

void norm_row(const float *x, const float *weight, int size, float eps, act *out) {
    vf scale = inverse_norm(x, size, eps);
    for (int i = 0; i < size; i += LANES)
        act_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
}

static void norm_head(float *head, const float *weight, int size, float eps) {
    vf scale = inverse_norm(head, size, eps);
    for (int i = 0; i < size; i += LANES)
        vf_store(head + i, vf_mul(vf_mul(vf_load(head + i), scale), vf_load(weight + i)));
}

/* Half rotation: dimension i turns with dimension i + head_dim / 2. */
static void rotate_head(float *head, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        vf first = vf_load(head + i), second = vf_load(head + half + i), c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(head + i, vf_sub(vf_mul(first, c), vf_mul(second, s)));
        vf_store(head + half + i, vf_add(vf_mul(second, c), vf_mul(first, s)));
    }
}

INLINE word k_word(const float *dims) {
#if PK_BF16
    return (word)bf16_of(dims[0]) | (word)bf16_of(dims[1]) << 16;
#else
    return dims[0];
#endif
}

/* Drawn in pk.h: in K a slot is a column of the tile, in V a line or half the words of one. */
static void store_head(const pk_model *model, const float *k, const float *v, word *k_head, word *v_head, int slot) {
    word *k_slot = k_head + slot / TILE * tile_words(model) + slot % TILE;
    for (int d = 0; d < model->head_dim; d += DEPTH) k_slot[(size_t)d / DEPTH * TILE] = k_word(k + d);
    word *v_line = v_head + slot / TILE * tile_words(model) + (size_t)(slot % TILE / DEPTH) * (size_t)model->head_dim;
#if PK_BF16
    bf16 *v_slot = (bf16 *)v_line + slot % DEPTH;
    for (int d = 0; d < model->head_dim; d++) v_slot[DEPTH * d] = bf16_of(v[d]);
#else
    memcpy(v_line, v, sizeof(float) * (size_t)model->head_dim);
#endif
}

void write_row(const pk_model *model, const pk_layer *layer, float *qkv, act *q, const float *cos, const float *sin,
               word *block, int slot) {
    const int dim = model->head_dim, rotated = model->heads + model->kv_heads;
    for (int head = 0; head < rotated; head++) {
        if (layer->qk_norm) norm_head(qkv + head * dim, layer->qk_norm + head * dim, dim, model->eps);
        rotate_head(qkv + head * dim, cos, sin, dim / 2);
    }
    for (int i = 0; i < model->heads * dim; i += LANES) act_store(q + i, vf_load(qkv + i));
    const float *k = qkv + model->heads * dim, *v = k + model->kv_heads * dim;
    const size_t head_words = (size_t)(model->block_size / TILE) * tile_words(model);
    for (int head = 0; head < model->kv_heads; head++)
        store_head(model, k + head * dim, v + head * dim, block + head * head_words,
                   block + plane_words(model) + head * head_words, slot);
}

void silu_row(const float *gate_up, int intermediate, act *out) {
    const int half = PANEL / 2;
    for (int i = 0; i < intermediate; i += LANES) {
        const float *gate = gate_up + i / half * PANEL + i % half;
        act_store(out + i, vf_mul(vf_silu(vf_load(gate)), vf_load(gate + half)));
    }
}

void add_row(float *to, const float *from, int size) {
    for (int i = 0; i < size; i += LANES) vf_store(to + i, vf_add(vf_load(to + i), vf_load(from + i)));
}
