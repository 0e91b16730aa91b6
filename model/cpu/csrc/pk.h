/* One forward pass of a Llama-family decoder over a paged cache, in C: what the parts share. Reading order:

       vec.h  ->  pk.h  ->  linear.c, quantized.c  ->  rows.c  ->  segment.c, attention.c  ->  team.c  ->  step.c,
       and load.c, for when a model is loaded

   Python (model/cpu/) packs the weights, owns all memory, and calls pk_step once per step with raw pointers. Nothing
   here allocates but the scratch of pk_open, and nothing can fail once that has succeeded. */
#ifndef PK_H
#define PK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "vec.h"

/* Matrices ----------------------------------------------------------------------------------------------------------

   W [columns, depth] of y = x W^T lies in panels of PANEL columns, words of all of them side by side (columns and depth
   are filled up with zeros):

       panel 0:  word 0: [ c0 c1 ... c31 ]    word 1: [ c0 ... c31 ]   ...   depth / DEPTH words
       panel 1:  ...                                                                                              */

#define PANEL 32

typedef struct {
    const word *panels;
    const float *bias;       /* [columns] in the order of the panels, or NULL */
    const char *quantized;   /* the same values as the file has them, in panels of their own (quantized.c), or NULL */
    const int64_t *panel_at; /* [panels] where each begins in `quantized` */
    const uint8_t *kind;     /* [panels] how each is quantized */
    int32_t columns;         /* a multiple of PANEL */
    int32_t depth;           /* a multiple of PANEL */
} pk_matrix;

/* What a low-rank adapter adds to one product: up (down x). */
typedef struct {
    pk_matrix down; /* columns: the rank, filled up to whole panels */
    pk_matrix up;   /* depth: likewise */
} pk_delta;

typedef struct {
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
    const float *qk_norm;        /* [heads + kv_heads, head_dim], or NULL */
    pk_matrix qkv, o;
    pk_matrix gate_up;           /* 16 columns of gate, then the same 16 of up, in each panel */
    pk_matrix down;
} pk_layer;

typedef struct {
    int32_t hidden, intermediate, heads, kv_heads, head_dim, layers, vocab, block_size;
    float eps;
    int32_t quantized_rows;      /* steps of at most so many rows read `quantized` where a matrix has both */
    const void *embedding;       /* [vocab, hidden], bfloat16 or float as PK_BF16 says */
    const float *norm;           /* [hidden] */
    pk_matrix head;
    const pk_layer *layer;       /* [layers] */
} pk_model;

/* The cache ---------------------------------------------------------------------------------------------------------

   A block is contiguous; a layer's part of it is K, then V; each is cut into heads, each head into tiles of TILE slots:

       block:  [ layer 0: K | V ][ layer 1: K | V ] ...        K, V:  [ head 0: tile 0, tile 1 ... ][ head 1 ] ...

       K tile:   dims 0,1: [ slot 0 .. slot 15 ]     dims 2,3: [ slot 0 .. slot 15 ] ...           (head_dim / DEPTH words)
       V tile:   slots 0,1: [ dim 0 .. dim n-1 ]     slots 2,3: [ dim 0 .. dim n-1 ] ...               (TILE / DEPTH words)

   so that neither scores nor mixed values need a sum across lanes. With PK_BF16=0 there is one dim, one slot per line. */

#define TILE 16

/* One step ----------------------------------------------------------------------------------------------------------

   Rows are positions to compute, in any mixture. A group is a run of rows of one request at ascending positions: a whole
   span; for the last layer, where only the sampled rows are read, a run of those. */

typedef struct {
    int32_t row;      /* of its first row: in the step's rows, or in the logits' */
    int32_t count;
    int32_t position; /* of its first row */
    int32_t table;    /* which row of `tables` */
} pk_group;

/* Rows that one adapter changes. The deltas are by layer: qkv, o, gate_up, down; columns 0 where there is none. */
typedef struct {
    const pk_delta *deltas; /* [layers][4] */
    const int32_t *rows;    /* among the step's rows, ascending */
    const int32_t *logits;  /* among the logits' rows, ascending */
    int32_t num_rows;
    int32_t num_logits;
} pk_adapter;

typedef struct {
    const int64_t *ids;       /* [rows] */
    const int64_t *positions; /* [rows] */
    const int64_t *slots;     /* [rows] block * block_size + offset */
    const pk_group *groups;
    const pk_group *last_groups;
    const int64_t *logit_rows; /* [num_logits] among the rows, ascending */
    const int32_t *tables;     /* [.., table_width] block ids */
    const pk_adapter *adapters;
    char *cache;               /* of word, blocks one after the other */
    const float *cos, *sin;    /* [positions, head_dim / 2] */
    float *logits;             /* [num_logits, vocab] */
    double *seconds;           /* [PK_TIMES] to add to, or NULL */
    int32_t rows, num_groups, num_last_groups, num_logits, table_width, num_adapters;
} pk_step_inputs;

enum { TIME_LINEAR, TIME_ATTENTION, TIME_ROWS, TIME_HEAD, PK_TIMES };

/* Threads: team.c --------------------------------------------------------------------------------------------------- */

typedef struct pk_team pk_team;
typedef struct {
    pk_team *team;
    int32_t index, count; /* this thread among all */
    char *scratch;        /* of this thread alone, 64-byte aligned */
} pk_thread;

pk_team *team_start(int threads, size_t scratch_bytes);
void team_stop(pk_team *team);
void team_rouse(pk_team *team); /* a step is being prepared: have all threads awake when it begins */
void team_run(pk_team *team, void (*work)(pk_thread *, void *), void *argument); /* on all threads, this one among them */
void team_wait(pk_thread *thread);      /* for all; then tasks count from 0 again */
int team_next_task(pk_thread *thread);  /* each number once, from 0 */

INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int larger(int a, int b) { return a > b ? a : b; }

/* [*start, *end) of `count` for this thread: contiguous, in whole units of `unit` */
INLINE void my_share(const pk_thread *thread, int count, int unit, int *start, int *end) {
    int64_t units = (count + unit - 1) / unit;
    *start = (int)(units * thread->index / thread->count) * unit;
    *end = (int)(units * (thread->index + 1) / thread->count) * unit;
    if (*end > count) *end = count;
    if (*start > count) *start = count;
}

/* linear.c ---------------------------------------------------------------------------------------------------------- */

typedef enum {
    OUT_STORE, /* out[r][c] = y           */
    OUT_ADD,   /* out[r][c] += y          */
    OUT_SILU,  /* rows[r][c / 2] = silu(gate) * up, of panels of gate and up */
} out_kind;

typedef struct {
    out_kind kind;
    float *out; /* OUT_STORE, OUT_ADD */
    act *rows;  /* OUT_SILU */
    size_t stride;
    int columns; /* only so many of each row exist in `out` (the vocabulary need not be whole panels) */
} pk_out;

/* Every thread calls it with the same arguments; x is [count, depth], row r at x + r * depth. */
void linear(pk_thread *thread, const pk_matrix *w, const act *x, int count, pk_out out, int quantized_rows);

/* quantized.c ------------------------------------------------------------------------------------------------------- */

enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14 }; /* kinds, by GGUF's own numbers */
#define EACH_KIND(CASE) CASE(Q4_0) CASE(Q4_1) CASE(Q8_0) CASE(Q4_K) CASE(Q6_K)
#define GROUP 32 /* values along the depth that are quantized together */

/* What sums are made of: a pair of bfloat16 where the processor multiplies those, else a float. */
#if PK_DOT
typedef word unit;
#define UNIT_DEPTH DEPTH
#else
typedef float unit;
#define UNIT_DEPTH 1
#endif

size_t quantized_group_bytes(int kind); /* of one group of PANEL columns; 0 for a kind that is not known */
/* `groups` groups of a panel, `vectors` vectors of its columns from `column` on, to units [depth][vectors * LANES] */
void quantized_units(int kind, const char *group, int groups, int column, int vectors, unit *out);
/* y [rows][PANEL] of a whole panel and QUANTIZED_ROWS rows at most, row r at x + r * stride */
#define QUANTIZED_ROWS 6
void quantized_dot(int kind, int rows, const char *group, int groups, const act *x, size_t stride, float *y);

/* rows.c ------------------------------------------------------------------------------------------------------------ */

void embed_row(const pk_model *model, int64_t id, float *out);
void norm_row(const float *x, const float *weight, int size, float eps, act *out);
/* Normalise, turn, and store one row of q, k, v [heads + 2 * kv_heads, head_dim]: q for the attention, K and V in the cache. */
void write_row(const pk_model *model, const pk_layer *layer, float *qkv, act *q, const float *cos, const float *sin,
               word *block, int slot);
void silu_row(const float *gate_up, int intermediate, act *out);
void add_row(float *to, const float *from, int size);

/* attention.c ------------------------------------------------------------------------------------------------------- */

/* Every thread calls it. q [rows, heads, head_dim] -> out likewise, of the rows in the groups. `partials` are for what
   threads do not finish alone. */
void attention(pk_thread *thread, const pk_model *model, const pk_step_inputs *step, int layer, const pk_group *groups,
               int num_groups, const act *q, act *out, char *partials);
size_t attention_scratch(const pk_model *model);
size_t attention_partials(const pk_model *model, const pk_group *groups, int num_groups, int threads); /* in bytes */

/* Where things are in the cache ------------------------------------------------------------------------------------- */

INLINE size_t plane_words(const pk_model *model) { /* K or V of one layer of one block */
    return (size_t)model->kv_heads * model->block_size * model->head_dim / DEPTH;
}
INLINE size_t block_words(const pk_model *model) { return plane_words(model) * 2 * model->layers; }
INLINE size_t tile_words(const pk_model *model) { return (size_t)TILE * model->head_dim / DEPTH; }

#endif
