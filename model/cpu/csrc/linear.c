/* Matrix products: rows times panels (pk.h). */

#include "pk.h"

/* Registers hold the sums of a few rows of one panel. With 16 registers (AVX2): 3 rows of the whole panel (4 vectors), or
   6 rows of half of it; with 32 (AVX-512): 12 rows of the whole panel (2 vectors). */
#if LANES == 16
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#define WHOLE_ROWS 3
#endif

/* So many rows of x stay in the second-level cache while all panels pass by. */
#define CHUNK_ROWS 48

/* Words that must be widened to be multiplied are widened once for all rows: so many values of two vectors of columns, which
   stay in the first-level cache meanwhile. */
#define BLOCK_DEPTH 256
#define BLOCK_COLUMNS (2 * LANES)

INLINE void tile_dot(const int rows, const int vectors, const act *x, int depth, const word *w, float *y) {
    vf sums[TILE_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = vf_zero();
    const word *const columns[4] = {w, w + LANES, w + 2 * LANES, w + 3 * LANES};
    v_dot(rows, vectors, sums, x, depth, columns, PANEL, depth / DEPTH);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) vf_store(y + r * PANEL + j * LANES, sums[r][j]);
}

#if LANES == 16
#define CASE(n)                                 \
    case n:                                     \
        tile_dot(n, 2, x, depth, w, y);         \
        break;
#else
#define CASE(n)                                                   \
    case n:                                                       \
        if (n <= WHOLE_ROWS) {                                    \
            tile_dot(n, 4, x, depth, w, y);                       \
        } else {                                                  \
            tile_dot(n, 2, x, depth, w, y);                       \
            tile_dot(n, 2, x, depth, w + PANEL / 2, y + PANEL / 2); \
        }                                                         \
        break;
#endif

/* y [rows][PANEL] = x [rows, depth] times one panel */
static void panel_dot(int rows, const act *x, int depth, const word *w, float *y) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

void panel_out(const pk_matrix *w, int panel, const float *y, int first, int rows, const pk_out *out) {
    const int start = panel * PANEL;
    for (int r = 0; r < rows; r++, y += PANEL) {
        vf value[PANEL / LANES];
        UNROLL for (int j = 0; j < PANEL / LANES; j++) {
            value[j] = vf_load(y + j * LANES);
            if (w->bias) value[j] = vf_add(value[j], vf_load(w->bias + start + j * LANES));
        }
        if (out->kind == OUT_SILU) {
            act *to = out->rows + (first + r) * out->stride + start / 2;
            UNROLL for (int j = 0; j < PANEL / LANES / 2; j++)
                act_store(to + j * LANES, vf_mul(vf_silu(value[j]), value[PANEL / LANES / 2 + j]));
            continue;
        }
        float *to = out->out + (first + r) * out->stride + start;
        if (start + PANEL > out->columns) { /* the last panel, filled up */
            float all[PANEL];
            UNROLL for (int j = 0; j < PANEL / LANES; j++) vf_store(all + j * LANES, value[j]);
            for (int c = 0; c < out->columns - start; c++) to[c] = out->kind == OUT_ADD ? to[c] + all[c] : all[c];
            continue;
        }
        UNROLL for (int j = 0; j < PANEL / LANES; j++) {
            if (out->kind == OUT_ADD) value[j] = vf_add(vf_load(to + j * LANES), value[j]);
            vf_store(to + j * LANES, value[j]);
        }
    }
}

/* Tiles of equal size, give or take one row: the rows of the next one of `tiles` that are left for `left` rows. */
INLINE int next_rows(int left, int tiles) { return (left + tiles - 1) / tiles; }

#if PK_DOT

static void panel_rows(const act *x, int rows, int depth, const word *w, float *y) {
    for (int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
        int taken = next_rows(rows, tiles);
        panel_dot(taken, x, depth, w, y);
        x += (size_t)taken * depth;
        y += taken * PANEL;
        rows -= taken;
    }
}

#else

INLINE void block_dot(const int rows, const float *x, int row_stride, const float *w, int depth, float *y) {
    vf sums[TILE_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) sums[r][j] = vf_load(y + r * PANEL + j * LANES);
    v_dot_floats(rows, 2, sums, x, row_stride, w, depth);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) vf_store(y + r * PANEL + j * LANES, sums[r][j]);
}

#define BLOCK_CASE(n)                            \
    case n:                                      \
        block_dot(n, x, stride, w, depth, y);    \
        break;

static void block_rows(int rows, const float *x, int stride, const float *w, int depth, float *y) {
    switch (rows) {
        BLOCK_CASE(1) BLOCK_CASE(2) BLOCK_CASE(3) BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
#if LANES == 16
        BLOCK_CASE(7) BLOCK_CASE(8) BLOCK_CASE(9) BLOCK_CASE(10) BLOCK_CASE(11) BLOCK_CASE(12)
#endif
    }
}

/* y [rows][PANEL] = x times one panel. The sums leave their registers between blocks of the depth, which changes no bit. */
static void panel_rows(const act *x, int rows, int depth, const word *w, float *y) {
    if (rows <= TILE_ROWS) {
        panel_dot(rows, x, depth, w, y);
        return;
    }
    float block[BLOCK_DEPTH * BLOCK_COLUMNS] __attribute__((aligned(64)));
    memset(y, 0, sizeof(float) * (size_t)(rows * PANEL));
    for (int column = 0; column < PANEL; column += BLOCK_COLUMNS)
        for (int k = 0; k < depth; k += BLOCK_DEPTH) {
            int count = depth - k < BLOCK_DEPTH ? depth - k : BLOCK_DEPTH;
            v_widen(2, w + (size_t)k / DEPTH * PANEL + column, PANEL, count / DEPTH, block);
            int row = 0;
            for (int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
                int taken = next_rows(rows - row, tiles);
                block_rows(taken, x + (size_t)row * depth + k, depth, block, count, y + row * PANEL + column);
                row += taken;
            }
        }
}

#endif

/* Rows [first, end), CHUNK_ROWS at most, times panels [start, stop). */
static void product(const pk_matrix *w, const act *x, int first, int end, int start, int stop, const pk_out *out) {
    const size_t panel_words = (size_t)PANEL * w->depth / DEPTH;
    float y[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
    for (int panel = start; panel < stop; panel++) {
        panel_rows(x + (size_t)first * w->depth, end - first, w->depth, w->panels + panel * panel_words, y);
        panel_out(w, panel, y, first, end - first, out);
    }
}

static void product_quantized(const pk_matrix *w, const act *x, int rows, int start, int stop, const pk_out *out) {
    float y[PANEL_ROWS * PANEL] __attribute__((aligned(64)));
    for (int panel = start; panel < stop; panel++) {
        quantized_panel(w, panel, x, rows, y);
        panel_out(w, panel, y, 0, rows, out);
    }
}

/* Few rows: each thread takes its share of the panels, which are read once. Many: chunks of rows, one after the other. */
void linear(pk_thread *thread, const pk_matrix *w, const act *x, int count, pk_out out, int quantized_rows) {
    const int panels = w->columns / PANEL;
    int start, stop;
    if (count < 2 * TILE_ROWS * thread->count || count <= CHUNK_ROWS) {
        my_share(thread, panels, 1, &start, &stop);
        if (w->quantized && count <= quantized_rows)
            product_quantized(w, x, count, start, stop, &out);
        else
            for (int row = 0; row < count; row += CHUNK_ROWS)
                product(w, x, row, count - row < CHUNK_ROWS ? count : row + CHUNK_ROWS, start, stop, &out);
        return;
    }
    int chunk = (count + thread->count - 1) / thread->count;
    chunk = chunk > CHUNK_ROWS ? CHUNK_ROWS : (chunk + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int task; (task = team_next_task(thread)) * chunk < count;) {
        int end = (task + 1) * chunk < count ? (task + 1) * chunk : count;
        product(w, x, task * chunk, end, 0, panels, &out);
    }
}
