/* Attention over the paged cache, causal by position, whatever the rows are: a decode token, a chunk, a repaired gap.

   The keys 0..position of a row are cut into segments of SEGMENT, counted from 0. Each gives a partial of its own (maximum,
   sum, mixed values); partials are merged in order. So a row's bits depend on its keys alone: not on the rows beside it,
   nor on where a span or a chunk began. Keys that a row must not see get a weight of exactly 0.

   A task is some positions of one group and one K/V head; with the query heads that share it these are `positions x shared`
   rows, taken TILE_ROWS at a time:

       scores [rows][keys]  = q . K tiles             one word of K: the same dims of 16 keys
       weights              = 2^(score - maximum)
       mixed  [rows][dims]  = weights . V tiles       one word of V: the same keys of one dim                           */

#include "pk.h"

#define SEGMENT 128
#define SEGMENT_TILES (SEGMENT / TILE)
#define TASK_ROWS 96 /* most rows of a task, so that their states stay in the second-level cache */
#define TILE_ROWS 6
#define LOWEST (-1e30f)
#define LOG2_E 1.44269504088896f

/* What a row has gathered so far: maximum, sums by lane, mixed values. */
typedef struct {
    float maximum;
    float sums[LANES];
    float mixed[]; /* [head_dim] */
} row_state;

typedef struct {
    const pk_model *model;
    const word *k[SEGMENT_TILES], *v[SEGMENT_TILES];      /* of the segment */
    const word *next_k[SEGMENT_TILES], *next_v[SEGMENT_TILES]; /* of the one that follows */
    int tiles, next_tiles;
    int fetch; /* few rows: K and V come from memory, and are asked for ahead of their use */
    float scale; /* of scores, to the base 2 */
    act *q;      /* [rows, head_dim] of the task */
    char *states;
    size_t state_bytes;
} scene;

static size_t state_bytes(const pk_model *model) {
    return (sizeof(row_state) + sizeof(float) * (size_t)model->head_dim + 63) / 64 * 64;
}

static int task_positions(const pk_model *model) {
    int shared = model->heads / model->kv_heads;
    return shared < TASK_ROWS ? TASK_ROWS / shared : 1;
}

static int task_rows(const pk_model *model) { return task_positions(model) * (model->heads / model->kv_heads); }

size_t attention_scratch(const pk_model *model) {
    return (size_t)task_rows(model) * (state_bytes(model) + sizeof(act) * (size_t)model->head_dim) + 64;
}

INLINE row_state *state_of(const scene *s, int row) { return (row_state *)(s->states + s->state_bytes * (size_t)row); }

/* A tile lies apart from the next one, too short for the processor to foresee it. While scores are made of the segment's K
   its V is fetched, while values are mixed the next segment's K. */
INLINE void fetch_tile(const scene *s, const word *tile) {
    const char *end = (const char *)(tile + tile_words(s->model));
    for (const char *line = (const char *)tile; line < end; line += 64) _mm_prefetch(line, _MM_HINT_T0);
}

/* -- one tile of rows, one segment ------------------------------------------------------------------------------- */

INLINE const word *key_vector(const scene *s, int vector) {
    return s->k[vector * LANES / TILE] + vector * LANES % TILE;
}

INLINE void score_vectors(const int rows, const int vectors, const scene *s, const act *q, int first, float *scores) {
    vf sums[TILE_ROWS][4];
    const word *keys[4];
    UNROLL for (int j = 0; j < vectors; j++) {
        keys[j] = key_vector(s, first + j);
        if (s->fetch && (first + j) * LANES % TILE == 0) fetch_tile(s, s->v[(first + j) * LANES / TILE]);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    v_dot(rows, vectors, sums, q, (size_t)s->model->head_dim, keys, TILE, s->model->head_dim / DEPTH, 0, NULL);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) vf_store(scores + r * SEGMENT + (first + j) * LANES, sums[r][j]);
}

INLINE void mix_vectors(const int rows, const int vectors, const scene *s, const act *weights, int first,
                        const float *old_share, const float *new_share, int row) {
    vf sums[TILE_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    for (int tile = 0; tile < s->tiles; tile++) {
        if (s->fetch && first == 0 && tile < s->next_tiles) fetch_tile(s, s->next_k[tile]);
        const word *v = s->v[tile] + first * LANES;
        const word *const dims[4] = {v, v + LANES, v + 2 * LANES, v + 3 * LANES};
        v_dot(rows, vectors, sums, weights + tile * TILE, SEGMENT, dims, (size_t)s->model->head_dim, TILE / DEPTH, 0,
              NULL);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) {
            float *mixed = state_of(s, row + r)->mixed + (first + j) * LANES;
            vf kept = vf_mul(sums[r][j], vf_set1(new_share[r]));
            vf_store(mixed, vf_fma(vf_load(mixed), vf_set1(old_share[r]), kept));
        }
}

/* Scores of one row to weights; the row's maximum and sums take the segment in. `keys` of them count. */
INLINE void weigh(const scene *s, row_state *state, float *scores, act *weights, int keys, float *old_share,
                  float *new_share) {
    const int vectors = s->tiles * TILE / LANES;
    for (int j = keys / LANES; j < vectors; j++)
        vf_store(scores + j * LANES, vf_first(keys - j * LANES, vf_load(scores + j * LANES), vf_set1(LOWEST)));
    vf highest = vf_load(scores), sum = vf_zero();
    for (int j = 1; j < vectors; j++) highest = vf_max(highest, vf_load(scores + j * LANES));
    const float maximum = vf_highest(highest);
    const vf scale = vf_set1(s->scale), offset = vf_set1(maximum);
    for (int j = 0; j < vectors; j++) {
        vf weight = vf_exp2(vf_mul(vf_sub(vf_load(scores + j * LANES), offset), scale));
        sum = vf_add(sum, weight);
        act_store(weights + j * LANES, weight);
    }
    const float before = state->maximum, after = before > maximum ? before : maximum;
    vf old_weight = vf_exp2(vf_set1((before - after) * s->scale)), new_weight = vf_exp2(vf_set1((maximum - after) * s->scale));
    vf_store(state->sums, vf_fma(vf_load(state->sums), old_weight, vf_mul(sum, new_weight)));
    state->maximum = after;
    float lane[LANES];
    vf_store(lane, old_weight);
    *old_share = lane[0];
    vf_store(lane, new_weight);
    *new_share = lane[0];
}

/* Rows [row, row + rows) of the task; keys[r] of the segment's keys count for row r. */
INLINE void segment_rows(const int rows, const scene *s, int row, const int *keys) {
    float scores[TILE_ROWS * SEGMENT] __attribute__((aligned(64)));
    act weights[TILE_ROWS * SEGMENT] __attribute__((aligned(64)));
    float old_share[TILE_ROWS], new_share[TILE_ROWS];
    const int wide = LANES == 16 || rows <= 3 ? 4 : 2; /* vectors whose sums fit in registers */
    const int key_vectors = s->tiles * TILE / LANES, dim_vectors = s->model->head_dim / LANES;
    const act *q = s->q + (size_t)row * (size_t)s->model->head_dim;
    int j = 0;
    for (; j + wide <= key_vectors; j += wide) score_vectors(rows, wide, s, q, j, scores);
    for (; j + 2 <= key_vectors; j += 2) score_vectors(rows, 2, s, q, j, scores);
    for (; j < key_vectors; j++) score_vectors(rows, 1, s, q, j, scores);
    for (int r = 0; r < rows; r++)
        weigh(s, state_of(s, row + r), scores + r * SEGMENT, weights + r * SEGMENT, keys[r], old_share + r, new_share + r);
    for (j = 0; j + wide <= dim_vectors; j += wide) mix_vectors(rows, wide, s, weights, j, old_share, new_share, row);
    for (; j < dim_vectors; j += 2) mix_vectors(rows, 2, s, weights, j, old_share, new_share, row);
}

#define CASE(n)                              \
    case n:                                  \
        segment_rows(n, s, row, keys);       \
        break;

static void segment_tile(int rows, const scene *s, int row, const int *keys) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* -- one task ---------------------------------------------------------------------------------------------------- */

/* Where the tiles of keys [start, end) lie, as far as one segment goes; returns how many there are. */
static int find_segment(const pk_model *model, const char *cache, const int32_t *table, int layer, int head, int start,
                        int end, const word **k, const word **v) {
    const int tiles_per_block = model->block_size / TILE;
    const size_t tile = tile_words(model), plane = plane_words(model);
    int tiles = (end - start + TILE - 1) / TILE;
    if (tiles > SEGMENT_TILES) tiles = SEGMENT_TILES;
    for (int i = 0; i < tiles; i++) {
        int number = start / TILE + i;
        size_t at = (size_t)table[number / tiles_per_block] * block_words(model) + (size_t)layer * 2 * plane +
                    (size_t)(head * tiles_per_block + number % tiles_per_block) * tile;
        k[i] = (const word *)cache + at;
        v[i] = k[i] + plane;
    }
    return tiles < 0 ? 0 : tiles;
}

static void finish_row(const row_state *state, int dim, act *out) {
    vf share = vf_set1(1.0f / vf_sum(vf_load(state->sums)));
    for (int i = 0; i < dim; i += LANES) act_store(out + i, vf_mul(vf_load(state->mixed + i), share));
}

/* Positions [position, position + count) of one request, whose rows begin at `q` and `out`; one K/V head. */
static void attend(scene *s, const char *cache, const int32_t *table, int layer, int head, int position, int count,
                   const act *q, act *out) {
    const pk_model *model = s->model;
    const int dim = model->head_dim, shared = model->heads / model->kv_heads, rows = count * shared;
    const size_t row_stride = (size_t)model->heads * dim, head_at = (size_t)head * shared * dim;
    for (int i = 0; i < count; i++)
        memcpy(s->q + (size_t)i * shared * dim, q + i * row_stride + head_at, sizeof(act) * (size_t)(shared * dim));
    for (int row = 0; row < rows; row++) {
        memset(state_of(s, row), 0, s->state_bytes);
        state_of(s, row)->maximum = LOWEST;
    }
    const int end = position + count;
    s->fetch = rows <= TILE_ROWS;
    s->next_tiles = find_segment(model, cache, table, layer, head, 0, end, s->next_k, s->next_v);
    for (int start = 0; start < end; start += SEGMENT) {
        s->tiles = s->next_tiles;
        memcpy(s->k, s->next_k, sizeof s->k);
        memcpy(s->v, s->next_v, sizeof s->v);
        s->next_tiles = find_segment(model, cache, table, layer, head, start + SEGMENT, end, s->next_k, s->next_v);
        int row = start > position ? (start - position) * shared : 0; /* earlier rows end before this segment */
        const int tiles = (rows - row + TILE_ROWS - 1) / TILE_ROWS;
        for (int tile = 0; tile < tiles; tile++) {
            int keys[TILE_ROWS], in_tile = (rows - row + tiles - tile - 1) / (tiles - tile);
            for (int r = 0; r < in_tile; r++) {
                int seen = position + (row + r) / shared + 1 - start;
                keys[r] = seen < SEGMENT ? seen : SEGMENT;
            }
            segment_tile(in_tile, s, row, keys);
            row += in_tile;
        }
    }
    for (int row = 0; row < rows; row++)
        finish_row(state_of(s, row), dim, out + row / shared * row_stride + head_at + (size_t)(row % shared) * dim);
}

void attention(pk_thread *thread, const pk_model *model, const pk_step_inputs *step, int layer, const pk_group *groups,
               int num_groups, const act *q, act *out) {
    scene s = {.model = model, .state_bytes = state_bytes(model)};
    s.scale = LOG2_E / __builtin_sqrtf((float)model->head_dim);
    s.states = thread->scratch;
    s.q = (act *)(thread->scratch + s.state_bytes * (size_t)task_rows(model));
    const int positions = task_positions(model);
    const size_t row_stride = (size_t)model->heads * model->head_dim;
    int group = 0, before = 0; /* tasks of earlier groups */
    for (int task = team_next_task(thread);; task = team_next_task(thread)) {
        int chunks = 0;
        for (; group < num_groups; group++) {
            chunks = (groups[group].count + positions - 1) / positions;
            if (task < before + chunks * model->kv_heads) break;
            before += chunks * model->kv_heads;
        }
        if (group == num_groups) return;
        const pk_group *g = &groups[group];
        int chunk = chunks - 1 - (task - before) / model->kv_heads; /* the longest first: threads end together */
        int first = chunk * positions, count = g->count - first < positions ? g->count - first : positions;
        size_t at = (size_t)(g->row + first) * row_stride;
        attend(&s, step->cache, step->tables + (size_t)g->table * step->table_width, layer,
               (task - before) % model->kv_heads, g->position + first, count, q + at, out + at);
    }
}
