/* Matrix products: rows times panels (pk.h).

   Few rows read each panel straight from memory, and the next one is fetched meanwhile. Many rows go in chunks; for each
   chunk a panel is cut into blocks of the depth, whose words are made ready for multiplying once and then serve all its rows:

       panel:  [ block 0 | block 1 | ... ]   ->   units [depth of a block][BLOCK_VECTORS vectors of columns], in the L1 cache

   Quantized panels take the second way always. Between blocks the sums rest in y, which changes no bit. */

#include "pk.h"

/* Registers hold the sums of a few rows. With 16 registers (AVX2): 3 rows of a whole panel (4 vectors), or 6 rows of half of
   it; with 32 (AVX-512): 12 rows of a whole panel (2 vectors). */
#if LANES == 16
#define TILE_ROWS 12
#define WHOLE_ROWS 12
#else
#define TILE_ROWS 6
#define WHOLE_ROWS 3
#endif
#define WHOLE_VECTORS (PANEL / LANES)

#define WORDS_ROWS (4 * TILE_ROWS) /* at most; few enough to read words as they lie */
#define CHUNK_ROWS 48              /* of x stay in the second-level cache while all panels pass by */
#define BLOCK_VECTORS 2            /* of columns in a block */
#define BLOCK_DEPTH 320            /* values at most; quantized: */
#define QUANTIZED_DEPTH 128

/* y[r][j] += row r times the block's vectors j, one line of units at each step */
INLINE void tile_dot(const int rows, const act *x, size_t row_stride, const unit *w, int steps, float *y) {
    vf sums[TILE_ROWS][BLOCK_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < BLOCK_VECTORS; j++) sums[r][j] = vf_load(y + r * PANEL + j * LANES);
    for (int step = 0; step < steps; step++, w += BLOCK_VECTORS * LANES, x += UNIT_DEPTH) {
        vw column[BLOCK_VECTORS];
        UNROLL for (int j = 0; j < BLOCK_VECTORS; j++) column[j] = vw_unit(w + j * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vx value = vx_part(x + r * row_stride, 0);
            UNROLL for (int j = 0; j < BLOCK_VECTORS; j++) sums[r][j] = v_multiply_add(sums[r][j], column[j], value);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < BLOCK_VECTORS; j++) vf_store(y + r * PANEL + j * LANES, sums[r][j]);
}

#define CASE(n)                                  \
    case n:                                      \
        tile_dot(n, x, stride, w, steps, y);     \
        break;

/* One block times TILE_ROWS rows at most. */
static void block_tile(int rows, const act *x, size_t stride, const unit *w, int steps, float *y) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

/* What is read next: `lines` lines of memory, `stride` bytes apart. */
typedef struct {
    const char *first;
    size_t stride;
    int lines;
} ahead;

/* Tiles of equal size, give or take one row. While they are multiplied, what is read next comes into the L2 cache. */
static void block_rows(int rows, const act *x, size_t stride, const unit *w, int steps, float *y, ahead next) {
    for (int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
        int taken = (rows + tiles - 1) / tiles, lines = (next.lines + tiles - 1) / tiles;
        for (int i = 0; i < lines; i++, next.first += next.stride) _mm_prefetch(next.first, _MM_HINT_T1);
        next.lines -= lines;
        block_tile(taken, x, stride, w, steps, y);
        x += (size_t)taken * stride;
        y += taken * PANEL;
        rows -= taken;
    }
}

/* -- few rows: words as they lie --------------------------------------------------------------------------------- */

/* Of each step's two lines of memory, `lines` are fetched meanwhile for the next panel, from `next` on. */
INLINE void words_dot(const int rows, const int vectors, const int lines, const act *x, int depth, const word *w, float *y,
                      const char *next) {
    vf sums[TILE_ROWS][4];
    const word *const columns[4] = {w, w + LANES, w + 2 * LANES, w + 3 * LANES};
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    v_dot(rows, vectors, sums, x, depth, columns, PANEL, depth / DEPTH, lines, next);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) vf_store(y + r * PANEL + j * LANES, sums[r][j]);
}

/* Memory is asked for ahead: with few rows a little, as the processor foresees most by itself; with rows enough to keep it
   busy, a panel. */
#define FEW_ROWS 3
#define NEAR 2048 /* bytes */

#define CASE(n)                                                                                   \
    case n:                                                                                       \
        if (n <= WHOLE_ROWS) {                                                                    \
            words_dot(n, WHOLE_VECTORS, 2 * fetch, x, depth, w, y, at + (n <= FEW_ROWS ? NEAR : 2 * half)); \
        } else {                                                                                  \
            words_dot(n, 2, fetch, x, depth, w, y, at + 2 * half);                                \
            words_dot(n, 2, fetch, x, depth, w + PANEL / 2, y + PANEL / 2, at + 3 * half);        \
        }                                                                                         \
        break;

INLINE void words_tile(int rows, const int fetch, const act *x, int depth, const word *w, float *y) {
    const size_t half = (size_t)depth / DEPTH * 64;
    const char *at = (const char *)w;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

static void panel_words(int rows, const act *x, int depth, const word *w, float *y) {
    for (int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, tile = 0; tile < tiles; tile++) {
        int taken = (rows + tiles - tile - 1) / (tiles - tile);
        if (tile == 0)
            words_tile(taken, 1, x, depth, w, y);
        else
            words_tile(taken, 0, x, depth, w, y); /* the panel is in the L2 cache by now */
        x += (size_t)taken * depth;
        y += taken * PANEL;
        rows -= taken;
    }
}

/* -- one panel --------------------------------------------------------------------------------------------------- */

static void dense_panel(const pk_matrix *w, int panel, const act *x, int rows, float *y) {
    const word *words = w->panels + (size_t)panel * PANEL * w->depth / DEPTH;
    if (rows <= WORDS_ROWS) {
        panel_words(rows, x, w->depth, words, y);
        return;
    }
    memset(y, 0, sizeof(float) * (size_t)rows * PANEL);
#if PK_DOT
    const size_t bytes = sizeof(word) * PANEL * (size_t)w->depth / DEPTH;
    block_rows(rows, x, (size_t)w->depth, words, w->depth / DEPTH, y,
               (ahead){(const char *)words + bytes, 64, (int)(bytes / 64)});
#else
    unit block[BLOCK_DEPTH * BLOCK_VECTORS * LANES] __attribute__((aligned(64)));
    const int blocks = (w->depth + BLOCK_DEPTH - 1) / BLOCK_DEPTH;
    const int most = (w->depth / blocks + PANEL - 1) / PANEL * PANEL; /* of equal depth, but for the last one */
    for (int column = 0; column < PANEL; column += BLOCK_VECTORS * LANES)
        for (int k = 0; k < w->depth; k += most) {
            int depth = w->depth - k < most ? w->depth - k : most;
            v_widen(BLOCK_VECTORS, words + (size_t)k / DEPTH * PANEL + column, PANEL, depth / DEPTH, block);
            /* then comes the next block of these columns, or else the first of the next columns, or of the next panel */
            const int ends = k + depth == w->depth, last = column + BLOCK_VECTORS * LANES == PANEL;
            const word *then = !ends ? words + (size_t)(k + depth) / DEPTH * PANEL + column
                               : last ? words + (size_t)w->depth / DEPTH * PANEL
                                      : words + column + BLOCK_VECTORS * LANES;
            block_rows(rows, x + k, (size_t)w->depth, block, depth, y + column,
                       (ahead){(const char *)then, sizeof(word) * PANEL, most / DEPTH});
        }
#endif
}

static void quantized_panel(const pk_matrix *w, int panel, const act *x, int rows, float *y) {
    const char *groups = w->quantized + w->panel_at[panel];
    const size_t group_bytes = quantized_group_bytes(w->kind[panel]);
    if (rows <= QUANTIZED_ROWS) {
        quantized_dot(w->kind[panel], rows, groups, w->depth / GROUP, x, (size_t)w->depth, y);
        return;
    }
    unit block[QUANTIZED_DEPTH * BLOCK_VECTORS * LANES] __attribute__((aligned(64)));
    memset(y, 0, sizeof(float) * (size_t)rows * PANEL);
    for (int column = 0; column < PANEL; column += BLOCK_VECTORS * LANES)
        for (int k = 0; k < w->depth; k += QUANTIZED_DEPTH) {
            int depth = w->depth - k < QUANTIZED_DEPTH ? w->depth - k : QUANTIZED_DEPTH;
            quantized_units(w->kind[panel], groups + (size_t)(k / GROUP) * group_bytes, depth / GROUP, column, BLOCK_VECTORS, block);
            block_rows(rows, x + k, (size_t)w->depth, block, depth / UNIT_DEPTH, y + column, (ahead){NULL, 0, 0});
        }
}

/* y [rows][PANEL] of one panel, put where `out` says. */
static void panel_out(const pk_matrix *w, int panel, const float *y, int first, int rows, const pk_out *out) {
    const int start = panel * PANEL;
    for (int r = 0; r < rows; r++, y += PANEL) {
        vf value[WHOLE_VECTORS];
        UNROLL for (int j = 0; j < WHOLE_VECTORS; j++) {
            value[j] = vf_load(y + j * LANES);
            if (w->bias) value[j] = vf_add(value[j], vf_load(w->bias + start + j * LANES));
        }
        if (out->kind == OUT_SILU) {
            act *to = out->rows + (first + r) * out->stride + start / 2;
            UNROLL for (int j = 0; j < WHOLE_VECTORS / 2; j++)
                act_store(to + j * LANES, vf_mul(vf_silu(value[j]), value[WHOLE_VECTORS / 2 + j]));
            continue;
        }
        float *to = out->out + (first + r) * out->stride + start;
        if (start + PANEL > out->columns) { /* the last panel, filled up */
            float all[PANEL];
            UNROLL for (int j = 0; j < WHOLE_VECTORS; j++) vf_store(all + j * LANES, value[j]);
            for (int c = 0; c < out->columns - start; c++) to[c] = out->kind == OUT_ADD ? to[c] + all[c] : all[c];
            continue;
        }
        UNROLL for (int j = 0; j < WHOLE_VECTORS; j++) {
            if (out->kind == OUT_ADD) value[j] = vf_add(vf_load(to + j * LANES), value[j]);
            vf_store(to + j * LANES, value[j]);
        }
    }
}

/* -- all panels -------------------------------------------------------------------------------------------------- */

/* Rows [first, end), CHUNK_ROWS at most, times panels [start, stop). */
static void chunk(const pk_matrix *w, const act *x, int first, int end, int start, int stop, int quantized,
                  const pk_out *out) {
    float y[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
    for (int panel = start; panel < stop; panel++) {
        const act *rows = x + (size_t)first * w->depth;
        if (quantized)
            quantized_panel(w, panel, rows, end - first, y);
        else
            dense_panel(w, panel, rows, end - first, y);
        panel_out(w, panel, y, first, end - first, out);
    }
}

/* Up to CHUNK_ROWS rows: each thread takes its share of the panels, so that they are read once. More: chunks of rows. */
void linear(pk_thread *thread, const pk_matrix *w, const act *x, int count, pk_out out, int quantized_rows) {
    const int panels = w->columns / PANEL;
    const int quantized = w->quantized && (!w->panels || count <= quantized_rows);
    if (count <= CHUNK_ROWS) {
        int start, stop;
        my_share(thread, panels, 1, &start, &stop);
        chunk(w, x, 0, count, start, stop, quantized, &out);
        return;
    }
    int rows = (count + thread->count - 1) / thread->count; /* every thread shall have one, if they are few */
    rows = rows > CHUNK_ROWS ? CHUNK_ROWS : (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int task; (task = team_next_task(thread)) * rows < count;) {
        int end = (task + 1) * rows < count ? (task + 1) * rows : count;
        chunk(w, x, task * rows, end, 0, panels, quantized, &out);
    }
}
