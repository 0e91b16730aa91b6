/* What attention.c and segment.c share: rows that attend to segments of keys. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "pk.h"

#define SEGMENT 128
#define SEGMENT_TILES (SEGMENT / TILE)
#define TILE_ROWS 6 /* most rows that are taken at a time */

/* What a row has gathered: of one segment (its partial), or of all segments so far. */
typedef struct {
    float maximum;
    float sums[LANES]; /* of the weights, by lane */
    float mixed[];     /* [head_dim] */
} row_state;

/* Some K/V heads of one segment of a request. */
typedef struct {
    const int32_t *table; /* of the request's blocks */
    int start, tiles;     /* the first key, and how many tiles of keys there are */
    int head, heads;
} piece;

/* A piece on its way from memory: what of it comes next. */
typedef struct {
    piece of;
    int tile, plane, head; /* where the next run begins */
    const char *line;      /* the next line of this run */
    int lines;             /* that are left of it */
} fetching;

/* What one thread works with. Rows lie by head, position, and query head of those that share the K/V head. */
typedef struct {
    const pk_model *model;
    const word *cache;               /* this layer's part of block 0 */
    float scale;                     /* of scores, to the base 2 */
    size_t state_bytes;
    char *states;                    /* of the rows */
    char *partials;                  /* of TILE_ROWS rows */
    act *q;                          /* [rows, head_dim] */
    const word *k[SEGMENT_TILES], *v[SEGMENT_TILES]; /* of the segment, in one head */
    int tiles;
    int fetch;                       /* whether `ahead` is fetched meanwhile */
    fetching ahead;
} scene;

INLINE size_t state_bytes(const pk_model *model) {
    return (sizeof(row_state) + sizeof(float) * (size_t)model->head_dim + 63) / 64 * 64;
}
INLINE row_state *state_of(const scene *s, int row) { return (row_state *)(s->states + s->state_bytes * (size_t)row); }
INLINE int shared_heads(const pk_model *model) { return model->heads / model->kv_heads; }

/* segment.c --------------------------------------------------------------------------------------------------------- */

void begin_rows(scene *s, int row, int rows);
/* The rows of a group in one K/V head, of which the scene's `row` is the first, take in the segment of the piece. Rows that
   end before it are left as they are. Partials go to `partials`, or, where that is NULL, are merged into the states. */
void take_in(scene *s, const pk_group *group, int row, const piece *segment, int head, char *partials);
void merge(const scene *s, row_state *state, const row_state *partial); /* of the keys that follow */
void finish_row(const scene *s, const row_state *state, act *out);

void fetch_begin(scene *s, const piece *next);
void fetch_rest(scene *s);

#endif
