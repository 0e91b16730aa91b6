/* Attention of the rows of one K/V head to one segment of keys; what is read next is fetched meanwhile.

   Rows are taken TILE_ROWS at a time:

       scores [rows][keys]  = q . K tiles             one word of K: the same dims of 16 keys
       weights              = 2^(score - maximum)
       mixed  [rows][dims]  = weights . V tiles       one word of V: the same keys of one dim

   Maximum, sum of the weights and mixed values are a row's partial. Keys that a row must not see weigh exactly 0. */

#include "attention.h"

#define LOWEST (-1e30f)

/* -- memory ------------------------------------------------------------------------------------------------------ */

INLINE const word *block_of(const scene *s, const piece *p, int tile) {
    const int number = (p->start / TILE + tile) / (s->model->block_size / TILE);
    return s->cache + (size_t)p->table[number] * block_words(s->model);
}

static void find_tiles(scene *s, const piece *p, int head) {
    const int per_block = s->model->block_size / TILE;
    s->tiles = p->tiles;
    for (int i = 0; i < p->tiles; i++) {
        s->k[i] = block_of(s, p, i) + (size_t)(head * per_block + i % per_block) * tile_words(s->model);
        s->v[i] = s->k[i] + plane_words(s->model);
    }
}

void fetch_begin(scene *s, const piece *next) { s->ahead = (fetching){.of = *next, .head = next->head}; }

/* Fetches what is left of this run and turns to the next one: a piece is fetched as it lies, block by block, K before V, and
   in those head by head. Returns 0 after the last. */
static int next_run(scene *s) {
    fetching *a = &s->ahead;
    for (; a->lines > 0; a->lines--, a->line += 64) _mm_prefetch(a->line, _MM_HINT_T1);
    if (a->tile >= a->of.tiles) return 0;
    const size_t tile = tile_words(s->model);
    const int per_block = s->model->block_size / TILE, left = a->of.tiles - a->tile;
    const int tiles = left < per_block ? left : per_block;
    const word *plane = block_of(s, &a->of, a->tile) + (size_t)a->plane * plane_words(s->model);
    a->line = (const char *)(plane + (size_t)(a->head * per_block) * tile);
    a->lines = (int)(tile * sizeof(word) / 64) * tiles;
    if (++a->head < a->of.head + a->of.heads) return 1;
    a->head = a->of.head;
    if (++a->plane < 2) return 1;
    a->plane = 0;
    a->tile += tiles;
    return 1;
}

void fetch_rest(scene *s) {
    while (next_run(s)) continue;
}

/* The next lines to fetch, `lines` of them, fewer than a run has; once all are fetched, the last ones again. */
INLINE const char *take_lines(scene *s, int lines) {
    fetching *a = &s->ahead;
    if (a->lines < lines && !next_run(s)) return a->line - 64 * lines;
    const char *line = a->line;
    a->line += 64 * lines;
    a->lines -= lines;
    return line;
}

/* -- one tile of rows -------------------------------------------------------------------------------------------- */

#define FETCH_STEPS (64 / LANES)

/* v_dot. With `fetch` each step fetches as many lines as it reads: memory is kept busy while this computes. */
INLINE void dot(scene *s, const int fetch, const int rows, const int vectors, vf (*sums)[4], const act *x,
                size_t row_stride, const word *const *w, size_t stride, int steps) {
    const int lines = vectors * LANES * (int)sizeof(word) / 64;
    if (!fetch) {
        v_dot(rows, vectors, sums, x, row_stride, w, stride, steps, 0, NULL);
        return;
    }
    for (int step = 0; step < steps; step += FETCH_STEPS) {
        const word *from[4];
        UNROLL for (int j = 0; j < vectors; j++) from[j] = w[j] + (size_t)step * stride;
        const char *next = take_lines(s, lines * FETCH_STEPS);
        v_dot(rows, vectors, sums, x + DEPTH * step, row_stride, from, stride, FETCH_STEPS, lines, next);
    }
}

INLINE row_state *partial_of(const scene *s, char *partials, int row) {
    return (row_state *)(partials + s->state_bytes * (size_t)row);
}

INLINE const word *key_vector(const scene *s, int vector) {
    return s->k[vector * LANES / TILE] + vector * LANES % TILE;
}

INLINE void score_vectors(const int rows, const int vectors, const int fetch, scene *s, const act *q, int first,
                          float *scores) {
    vf sums[TILE_ROWS][4];
    const word *keys[4];
    UNROLL for (int j = 0; j < vectors; j++) keys[j] = key_vector(s, first + j);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    const int dim = s->model->head_dim;
    dot(s, fetch, rows, vectors, sums, q, (size_t)dim, keys, TILE, dim / DEPTH);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) vf_store(scores + r * SEGMENT + (first + j) * LANES, sums[r][j]);
}

INLINE void mix_vectors(const int rows, const int vectors, const int fetch, scene *s, const act *weights, int first,
                        char *partials) {
    vf sums[TILE_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    for (int tile = 0; tile < s->tiles; tile++) {
        const word *v = s->v[tile] + first * LANES;
        const word *const dims[4] = {v, v + LANES, v + 2 * LANES, v + 3 * LANES};
        dot(s, fetch, rows, vectors, sums, weights + tile * TILE, SEGMENT, dims, (size_t)s->model->head_dim, TILE / DEPTH);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++)
            vf_store(partial_of(s, partials, r)->mixed + (first + j) * LANES, sums[r][j]);
}

/* Scores of one row to weights, of which the partial takes maximum and sums. `keys` of them count. */
INLINE void weigh(const scene *s, row_state *partial, float *scores, act *weights, int keys) {
    const int vectors = s->tiles * TILE / LANES;
    for (int j = keys / LANES; j < vectors; j++)
        vf_store(scores + j * LANES, vf_first(keys - j * LANES, vf_load(scores + j * LANES), vf_set1(LOWEST)));
    vf highest = vf_load(scores), sum = vf_zero();
    for (int j = 1; j < vectors; j++) highest = vf_max(highest, vf_load(scores + j * LANES));
    partial->maximum = vf_highest(highest);
    const vf scale = vf_set1(s->scale), offset = vf_set1(partial->maximum);
    for (int j = 0; j < vectors; j++) {
        vf weight = vf_exp2(vf_mul(vf_sub(vf_load(scores + j * LANES), offset), scale));
        sum = vf_add(sum, weight);
        act_store(weights + j * LANES, weight);
    }
    vf_store(partial->sums, sum);
}

/* keys[r] of the segment's keys count for row r. */
INLINE void segment_rows(const int rows, const int fetch, scene *s, const act *q, const int *keys, char *partials) {
    float scores[TILE_ROWS * SEGMENT] __attribute__((aligned(64)));
    act weights[TILE_ROWS * SEGMENT] __attribute__((aligned(64)));
    const int wide = LANES == 16 || rows <= 3 ? 4 : 2; /* vectors whose sums fit in registers */
    const int key_vectors = s->tiles * TILE / LANES, dim_vectors = s->model->head_dim / LANES;
    int j = 0;
    for (; j + wide <= key_vectors; j += wide) score_vectors(rows, wide, fetch, s, q, j, scores);
    for (; j + 2 <= key_vectors; j += 2) score_vectors(rows, 2, fetch, s, q, j, scores);
    for (; j < key_vectors; j++) score_vectors(rows, 1, fetch, s, q, j, scores);
    for (int r = 0; r < rows; r++)
        weigh(s, partial_of(s, partials, r), scores + r * SEGMENT, weights + r * SEGMENT, keys[r]);
    for (j = 0; j + wide <= dim_vectors; j += wide) mix_vectors(rows, wide, fetch, s, weights, j, partials);
    for (; j < dim_vectors; j += 2) mix_vectors(rows, 2, fetch, s, weights, j, partials);
}

#define CASE(n)                                         \
    case n:                                             \
        if (s->fetch)                                   \
            segment_rows(n, 1, s, q, keys, partials);   \
        else                                            \
            segment_rows(n, 0, s, q, keys, partials);   \
        break;

static void segment_tile(int rows, scene *s, const act *q, const int *keys, char *partials) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* -- rows -------------------------------------------------------------------------------------------------------- */

void begin_rows(scene *s, int row, int rows) {
    for (int r = row; r < row + rows; r++) {
        memset(state_of(s, r), 0, s->state_bytes);
        state_of(s, r)->maximum = LOWEST;
    }
}

void merge(const scene *s, row_state *state, const row_state *partial) {
    const float before = state->maximum, maximum = partial->maximum, after = before > maximum ? before : maximum;
    const vf old_share = vf_exp2(vf_set1((before - after) * s->scale));
    const vf new_share = vf_exp2(vf_set1((maximum - after) * s->scale));
    state->maximum = after;
    vf_store(state->sums, vf_fma(vf_load(state->sums), old_share, vf_mul(vf_load(partial->sums), new_share)));
    for (int i = 0; i < s->model->head_dim; i += LANES) {
        vf added = vf_mul(vf_load(partial->mixed + i), new_share);
        vf_store(state->mixed + i, vf_fma(vf_load(state->mixed + i), old_share, added));
    }
}

void finish_row(const scene *s, const row_state *state, act *out) {
    vf share = vf_set1(1.0f / vf_sum(vf_load(state->sums)));
    for (int i = 0; i < s->model->head_dim; i += LANES) act_store(out + i, vf_mul(vf_load(state->mixed + i), share));
}

void take_in(scene *s, const pk_group *group, int row, const piece *segment, int head, char *partials) {
    const int shared = shared_heads(s->model), rows = group->count * shared, start = segment->start;
    int r = start > group->position ? (start - group->position) * shared : 0; /* earlier rows end before it */
    find_tiles(s, segment, head);
    for (int tiles = (rows - r + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
        int keys[TILE_ROWS], in_tile = (rows - r + tiles - 1) / tiles;
        for (int i = 0; i < in_tile; i++) {
            int seen = group->position + (r + i) / shared + 1 - start;
            keys[i] = seen < SEGMENT ? seen : SEGMENT;
        }
        char *to = partials ? partials + s->state_bytes * (size_t)r : s->partials;
        segment_tile(in_tile, s, s->q + (size_t)(row + r) * (size_t)s->model->head_dim, keys, to);
        for (int i = 0; i < in_tile && !partials; i++) merge(s, state_of(s, row + r + i), partial_of(s, to, i));
        r += in_tile;
    }
}
