/* The forward pass in reading order, and what Python calls.

       embed -> [ norm -> q,k,v -> (norm heads) rotate, write K/V -> attend -> o -> +
                  norm -> gate,up -> silu(gate) * up -> down -> + ] x layers -> norm -> head

   All threads run `forward` together and wait for each other between its lines. A matrix product is shared out by
   columns or by chunks of rows, attention by segments or tasks, all else by rows. K and V of every row are written before any row
   attends, so decode tokens, chunks and repaired gaps need no special case. */

#include <stdlib.h>
#include <time.h>

#include "pk.h"

typedef struct {
    pk_model model;
    pk_team *team;
    int threads;
    int rows; /* that there is room for */
    float *stream;    /* [rows, hidden]: the residual stream */
    act *normed;      /* [rows, hidden] */
    float *qkv;       /* [rows, qkv columns] */
    act *q, *mixed;   /* [rows, heads * head_dim] */
    act *gated;       /* [rows, intermediate] */
    char *partials;   /* of attention */
    size_t partials_bytes;
    /* for rows with adapters, as there are: */
    float *product;   /* [rows, widest product] */
    act *taken;       /* [rows, widest depth] */
    float *low, *added;
    act *low_rows;
    const pk_step_inputs *step;
} pk_engine;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* -- one pass ---------------------------------------------------------------------------------------------------- */

typedef struct {
    pk_engine *engine;
    pk_thread *thread;
    const pk_step_inputs *step;
    double since;
} pass;

/* All threads meet; the time since they last did counts as `kind`. */
static void meet(pass *p, int kind) {
    team_wait(p->thread);
    if (p->thread->index == 0 && p->step->seconds) {
        double time = now();
        p->step->seconds[kind] += time - p->since;
        p->since = time;
    }
}

enum { DELTA_QKV, DELTA_O, DELTA_GATE_UP, DELTA_DOWN };

/* product[row] += up (down x[row]) for the adapter's rows, taken together */
static void add_delta(pass *p, const pk_adapter *adapter, const pk_delta *delta, const act *x, int is_last) {
    pk_engine *e = p->engine;
    const int32_t *rows = is_last ? adapter->logits : adapter->rows;
    const int count = is_last ? adapter->num_logits : adapter->num_rows;
    const int depth = delta->down.depth, rank = delta->down.columns, columns = delta->up.columns;
    if (count == 0 || rank == 0) return;
    int start, end;
    my_share(p->thread, count, 1, &start, &end);
    for (int i = start; i < end; i++)
        memcpy(e->taken + (size_t)i * depth, x + (size_t)rows[i] * depth, sizeof(act) * (size_t)depth);
    meet(p, TIME_LINEAR);
    linear(p->thread, &delta->down, e->taken, count, (pk_out){OUT_STORE, e->low, NULL, (size_t)rank, rank}, 0);
    meet(p, TIME_LINEAR);
    for (int i = start * rank; i < end * rank; i += LANES) act_store(e->low_rows + i, vf_load(e->low + i));
    meet(p, TIME_LINEAR);
    linear(p->thread, &delta->up, e->low_rows, count, (pk_out){OUT_STORE, e->added, NULL, (size_t)columns, columns}, 0);
    meet(p, TIME_LINEAR);
    for (int i = start; i < end; i++)
        add_row(e->product + (size_t)rows[i] * columns, e->added + (size_t)i * columns, columns);
    meet(p, TIME_LINEAR);
}

/* One product of `rows` rows. With adapters in the step it is first made whole in `product`, then put where it belongs:
   the same additions, so rows of the base model keep their bits. */
static void product(pass *p, int which, int layer, const pk_matrix *w, const act *x, int rows, pk_out out, int is_last) {
    pk_engine *e = p->engine;
    const int few = e->model.quantized_rows;
    if (p->step->num_adapters == 0) {
        linear(p->thread, w, x, rows, out, few);
        meet(p, TIME_LINEAR);
        return;
    }
    linear(p->thread, w, x, rows, (pk_out){OUT_STORE, e->product, NULL, (size_t)w->columns, w->columns}, few);
    meet(p, TIME_LINEAR);
    for (int i = 0; i < p->step->num_adapters; i++)
        add_delta(p, &p->step->adapters[i], &p->step->adapters[i].deltas[layer * 4 + which], x, is_last);
    int start, end;
    my_share(p->thread, rows, 1, &start, &end);
    for (int row = start; row < end; row++) {
        const float *made = e->product + (size_t)row * w->columns;
        if (out.kind == OUT_SILU)
            silu_row(made, e->model.intermediate, out.rows + row * out.stride);
        else if (out.kind == OUT_ADD)
            add_row(out.out + row * out.stride, made, w->columns);
        else
            memcpy(out.out + row * out.stride, made, sizeof(float) * (size_t)w->columns);
    }
    meet(p, TIME_ROWS);
}

static void norm_rows(pass *p, const float *weight, int rows) {
    const int hidden = p->engine->model.hidden;
    int start, end;
    my_share(p->thread, rows, 1, &start, &end);
    for (int row = start; row < end; row++)
        norm_row(p->engine->stream + (size_t)row * hidden, weight, hidden, p->engine->model.eps,
                 p->engine->normed + (size_t)row * hidden);
    meet(p, TIME_ROWS);
}

static void write_rows(pass *p, int layer) {
    pk_engine *e = p->engine;
    const pk_model *m = &e->model;
    const pk_step_inputs *s = p->step;
    const int half = m->head_dim / 2, columns = m->layer[layer].qkv.columns;
    int start, end;
    my_share(p->thread, s->rows, 1, &start, &end);
    for (int row = start; row < end; row++) {
        size_t block = (size_t)(s->slots[row] / m->block_size) * block_words(m) + (size_t)layer * 2 * plane_words(m);
        size_t angles = (size_t)s->positions[row] * half;
        write_row(m, &m->layer[layer], e->qkv + (size_t)row * columns, e->q + (size_t)row * m->heads * m->head_dim,
                  s->cos + angles, s->sin + angles, (word *)s->cache + block, (int)(s->slots[row] % m->block_size));
    }
    meet(p, TIME_ROWS);
}

/* From here on only the rows whose logits are wanted: they move to the front, in order. */
static void keep_logit_rows(pass *p) {
    pk_engine *e = p->engine;
    const size_t hidden = (size_t)e->model.hidden, mixed = (size_t)e->model.heads * e->model.head_dim;
    if (p->thread->index == 0)
        for (int i = 0; i < p->step->num_logits; i++) {
            size_t row = (size_t)p->step->logit_rows[i];
            memmove(e->stream + i * hidden, e->stream + row * hidden, sizeof(float) * hidden);
            memmove(e->q + i * mixed, e->q + row * mixed, sizeof(act) * mixed);
        }
    meet(p, TIME_ROWS);
}

static void run_layer(pass *p, int layer) {
    pk_engine *e = p->engine;
    const pk_model *m = &e->model;
    const pk_layer *l = &m->layer[layer];
    const pk_step_inputs *s = p->step;
    const size_t hidden = (size_t)m->hidden;
    const int last = layer == m->layers - 1;
    norm_rows(p, l->attention_norm, s->rows);
    product(p, DELTA_QKV, layer, &l->qkv, e->normed, s->rows,
            (pk_out){OUT_STORE, e->qkv, NULL, (size_t)l->qkv.columns, l->qkv.columns}, 0);
    write_rows(p, layer);
    int rows = s->rows;
    if (last) {
        rows = s->num_logits;
        if (rows == 0) return; /* nobody reads this layer's output */
        keep_logit_rows(p);
    }
    attention(p->thread, m, s, layer, last ? s->last_groups : s->groups, last ? s->num_last_groups : s->num_groups, e->q,
              e->mixed, e->partials);
    meet(p, TIME_ATTENTION);
    product(p, DELTA_O, layer, &l->o, e->mixed, rows, (pk_out){OUT_ADD, e->stream, NULL, hidden, m->hidden}, last);
    norm_rows(p, l->mlp_norm, rows);
    product(p, DELTA_GATE_UP, layer, &l->gate_up, e->normed, rows,
            (pk_out){OUT_SILU, NULL, e->gated, (size_t)m->intermediate, l->gate_up.columns}, last);
    product(p, DELTA_DOWN, layer, &l->down, e->gated, rows, (pk_out){OUT_ADD, e->stream, NULL, hidden, m->hidden}, last);
}

static void forward(pk_thread *thread, void *argument) {
    pk_engine *e = argument;
    const pk_model *m = &e->model;
    const pk_step_inputs *s = e->step;
    pass p = {e, thread, s, now()};
    int start, end;
    my_share(thread, s->rows, 1, &start, &end);
    for (int row = start; row < end; row++) embed_row(m, s->ids[row], e->stream + (size_t)row * m->hidden);
    for (int layer = 0; layer < m->layers; layer++) run_layer(&p, layer);
    if (s->num_logits == 0) return;
    norm_rows(&p, m->norm, s->num_logits);
    linear(thread, &m->head, e->normed, s->num_logits, (pk_out){OUT_STORE, s->logits, NULL, (size_t)m->vocab, m->vocab},
           m->quantized_rows);
    meet(&p, TIME_HEAD);
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

static int grow(void *buffer, size_t count, size_t size) {
    void **old = buffer;
    free(*old);
    *old = aligned_alloc(64, (count * size + 63) / 64 * 64 + 64);
    return *old != NULL;
}

static int reserve(pk_engine *e, int rows) {
    if (rows <= e->rows) return 1;
    const pk_model *m = &e->model;
    const size_t n = (size_t)rows, mixed = (size_t)m->heads * m->head_dim;
    e->rows = 0;
    if (!grow(&e->stream, n * m->hidden, sizeof(float)) || !grow(&e->normed, n * m->hidden, sizeof(act)) ||
        !grow(&e->qkv, n * m->layer[0].qkv.columns, sizeof(float)) || !grow(&e->q, n * mixed, sizeof(act)) ||
        !grow(&e->mixed, n * mixed, sizeof(act)) || !grow(&e->gated, n * m->intermediate, sizeof(act)))
        return 0;
    e->rows = rows;
    return 1;
}

static int reserve_partials(pk_engine *e, const pk_step_inputs *s) {
    const size_t some = attention_partials(&e->model, s->groups, s->num_groups, e->threads);
    const size_t last = attention_partials(&e->model, s->last_groups, s->num_last_groups, e->threads);
    const size_t bytes = some > last ? some : last;
    if (bytes <= e->partials_bytes) return 1;
    e->partials_bytes = 0;
    if (!grow(&e->partials, bytes, 1)) return 0;
    e->partials_bytes = bytes;
    return 1;
}

static int reserve_adapted(pk_engine *e, const pk_step_inputs *s) {
    const pk_model *m = &e->model;
    int rank = PANEL;
    for (int i = 0; i < s->num_adapters; i++)
        for (int j = 0; j < 4 * m->layers; j++) rank = larger(rank, s->adapters[i].deltas[j].down.columns);
    const size_t n = (size_t)s->rows;
    const size_t wide = (size_t)larger(larger(m->layer[0].qkv.columns, m->layer[0].gate_up.columns), m->hidden);
    const size_t deep = (size_t)larger(larger(m->hidden, m->heads * m->head_dim), m->intermediate);
    return grow(&e->product, n * wide, sizeof(float)) && grow(&e->added, n * wide, sizeof(float)) &&
           grow(&e->taken, n * deep, sizeof(act)) && grow(&e->low, n * rank, sizeof(float)) &&
           grow(&e->low_rows, n * rank, sizeof(act));
}

static void free_adapted(pk_engine *e) {
    void **buffers[] = {(void **)&e->product, (void **)&e->added, (void **)&e->taken, (void **)&e->low, (void **)&e->low_rows};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        free(*buffers[i]);
        *buffers[i] = NULL;
    }
}

/* -- what Python calls ------------------------------------------------------------------------------------------- */

/* So that a caller whose structures are laid out otherwise finds out before it does harm. */
void pk_sizes(int32_t sizes[7]) {
    const size_t real[7] = {sizeof(pk_matrix), sizeof(pk_delta), sizeof(pk_layer),      sizeof(pk_model),
                            sizeof(pk_group),  sizeof(pk_adapter), sizeof(pk_step_inputs)};
    for (int i = 0; i < 7; i++) sizes[i] = (int32_t)real[i];
}

/* The model's matrices stay where they are until pk_close. NULL when memory or threads run out. */
pk_engine *pk_open(const pk_model *model, int threads) {
    pk_engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->model = *model;
    e->threads = threads;
    e->team = team_start(threads, attention_scratch(model));
    if (!e->team) {
        free(e);
        return NULL;
    }
    return e;
}

void pk_close(pk_engine *e) {
    team_stop(e->team);
    void *buffers[] = {e->stream, e->normed, e->qkv, e->q, e->mixed, e->gated, e->partials};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
    free_adapted(e);
    free(e);
}

/* From the next step on, steps of at most so many rows read quantized weights where there are both. */
void pk_set_quantized_rows(pk_engine *e, int rows) { e->model.quantized_rows = rows; }

/* A step is being prepared. */
void pk_rouse(pk_engine *e) { team_rouse(e->team); }

/* Returns 0, or -1 when there is no memory for so many rows; then nothing was computed or written. */
int pk_step(pk_engine *e, const pk_step_inputs *step) {
    if (!reserve(e, step->rows) || !reserve_partials(e, step) || (step->num_adapters && !reserve_adapted(e, step))) {
        free_adapted(e);
        return -1;
    }
    e->step = step;
    team_run(e->team, forward, e);
    free_adapted(e);
    return 0;
}
