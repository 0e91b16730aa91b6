/* Attention over the paged cache, causal by position, whatever the rows are: a decode token, a chunk, a repaired gap.

   The keys 0..position of a row are cut into segments of SEGMENT, counted from 0. Each gives a partial of its own (maximum,
   sum, mixed values; segment.c); partials are merged in order. So a row's bits depend on its keys alone: not on the rows
   beside it, nor on where a span or a chunk began, nor on which thread makes which partial.

   Wide groups are bound by multiplication. A task is some positions of one group and one K/V head, whoever comes first.

   Narrow groups, decode tokens above all, are bound by memory. Their segments are laid out in a row, each K/V head's part
   being as long as it has tiles, and every thread has a stretch of it:

       group 0: [ segment 0: head 0 | head 1 | head 2 ][ segment 1: head 0 | ... ]  group 1: [ ...
                '---------------- thread 0 -----------------''----------- thread 1 ------------ ...

   A thread goes through its stretch in pieces, heads that lie side by side, and fetches the next piece while it computes
   one. Where a head of a group is in one stretch alone, its rows gather as they go. Where it is cut, the partials are kept,
   and merged once they are all there. */

#include "attention.h"

#define TASK_ROWS 96 /* most rows of a task, so that their states stay in the second-level cache */
#define NARROW_ROWS 192 /* most of a narrow group in all heads, likewise */
#define PIECE_BYTES (96 << 10) /* most of a piece of more than one head: two of them stay there as well */
#define LOG2_E 1.44269504088896f

static int task_positions(const pk_model *model) {
    int shared = shared_heads(model);
    return shared < TASK_ROWS ? TASK_ROWS / shared : 1;
}

static int is_narrow(const pk_model *model, const pk_group *group) {
    return group->count == 1 || group->count * model->heads <= NARROW_ROWS;
}

/* Most rows that a thread has at a time: those of a task, or of all heads of a narrow group. */
static size_t most_rows(const pk_model *model) {
    const int task = task_positions(model) * shared_heads(model), narrow = larger(NARROW_ROWS, model->heads);
    return (size_t)larger(task, narrow);
}

size_t attention_scratch(const pk_model *model) {
    return (most_rows(model) + TILE_ROWS) * state_bytes(model) + most_rows(model) * sizeof(act) * (size_t)model->head_dim;
}

/* Rows of one K/V head: [positions, shared heads] out of [rows, heads]. */
static void copy_q(scene *s, const pk_group *group, const act *q, int head, int row) {
    const pk_model *m = s->model;
    const size_t width = (size_t)shared_heads(m) * (size_t)m->head_dim;
    for (int i = 0; i < group->count; i++)
        memcpy(s->q + (size_t)row * (size_t)m->head_dim + (size_t)i * width,
               q + ((size_t)(group->row + i) * (size_t)m->kv_heads + (size_t)head) * width, sizeof(act) * width);
}

static act *out_of(const scene *s, const pk_group *group, act *out, int head, int r) {
    const int shared = shared_heads(s->model);
    const size_t row = (size_t)(group->row + r / shared), query_head = (size_t)(head * shared + r % shared);
    return out + (row * (size_t)s->model->heads + query_head) * (size_t)s->model->head_dim;
}

/* -- narrow groups: shared out --------------------------------------------------------------------------------------- */

typedef struct {
    const pk_model *model;
    const pk_group *groups; /* narrow ones and others */
    int num_groups, threads;
    int64_t tiles;          /* of all narrow groups, in all heads */
    size_t partials;        /* that are kept */
} layout;

typedef struct {
    const pk_group *group; /* NULL: there is none */
    int tiles, segments;   /* in one head */
    int64_t first;         /* of its tiles among all */
    size_t partials;       /* that are kept of earlier groups */
} narrow_group;

static int key_tiles(const pk_group *group) { return (group->position + group->count + TILE - 1) / TILE; }

/* Where a head's part of a segment begins. */
static int64_t part_start(const layout *all, const narrow_group *g, int segment, int head) {
    const int tiles = smaller(g->tiles - segment * SEGMENT_TILES, SEGMENT_TILES);
    return g->first + (int64_t)segment * SEGMENT_TILES * all->model->kv_heads + (int64_t)head * tiles;
}

static int64_t stretch_start(const layout *all, int thread) { return all->tiles * thread / all->threads; }

/* In whose stretch a part is that begins at `tile`. */
static int owner(const layout *all, int64_t tile) { return (int)(((tile + 1) * all->threads - 1) / all->tiles); }

static int is_cut(const layout *all, const narrow_group *g, int head) {
    return owner(all, part_start(all, g, 0, head)) != owner(all, part_start(all, g, g->segments - 1, head));
}

/* Partials that are kept of a group: [segments, heads, count, shared heads], if more than one thread has segments of it. */
static size_t kept_partials(const layout *all, const narrow_group *g) {
    const int last = all->model->kv_heads - 1;
    if (g->segments == 1) return 0;
    if (owner(all, part_start(all, g, 0, 0)) == owner(all, part_start(all, g, g->segments - 1, last))) return 0;
    return (size_t)g->segments * (size_t)(g->group->count * all->model->heads);
}

static narrow_group narrow_from(const layout *all, const pk_group *group, int64_t first, size_t partials) {
    const pk_group *end = all->groups + all->num_groups;
    while (group < end && !is_narrow(all->model, group)) group++;
    if (group == end) return (narrow_group){NULL, 0, 0, first, partials};
    const int tiles = key_tiles(group);
    return (narrow_group){group, tiles, (tiles + SEGMENT_TILES - 1) / SEGMENT_TILES, first, partials};
}

static narrow_group first_narrow(const layout *all) { return narrow_from(all, all->groups, 0, 0); }

static narrow_group next_narrow(const layout *all, const narrow_group *g) {
    return narrow_from(all, g->group + 1, g->first + (int64_t)g->tiles * all->model->kv_heads,
                       g->partials + kept_partials(all, g));
}

static layout lay_out(const pk_model *model, const pk_group *groups, int num_groups, int threads) {
    layout all = {model, groups, num_groups, threads, 0, 0};
    for (int i = 0; i < num_groups; i++)
        if (is_narrow(model, &groups[i])) all.tiles += (int64_t)key_tiles(&groups[i]) * model->kv_heads;
    narrow_group g = first_narrow(&all);
    while (g.group) g = next_narrow(&all, &g);
    all.partials = g.partials;
    return all;
}

size_t attention_partials(const pk_model *model, const pk_group *groups, int num_groups, int threads) {
    return lay_out(model, groups, num_groups, threads).partials * state_bytes(model);
}

/* -- narrow groups: computed ----------------------------------------------------------------------------------------- */

/* A thread on its way through its stretch. */
typedef struct {
    const layout *all;
    int64_t start, end;
    const int32_t *tables;
    int table_width, most_heads; /* of a piece */
    narrow_group g;
    int segment, head; /* where the next piece begins */
} walk;

/* How many parts of `tiles` each, laid out from 0 on, begin before `tile`. */
static int parts_before(const pk_model *model, int64_t tile, int tiles) {
    const int64_t parts = tile <= 0 ? 0 : (tile + tiles - 1) / tiles;
    return parts < model->kv_heads ? (int)parts : model->kv_heads;
}

/* The next piece, and of which group it is; 0 at the stretch's end. */
static int next_piece(walk *w, piece *p, narrow_group *g) {
    const pk_model *m = w->all->model;
    for (; w->g.group && w->g.first < w->end; w->g = next_narrow(w->all, &w->g), w->segment = w->head = 0)
        for (; w->segment < w->g.segments; w->segment++, w->head = 0) {
            const int tiles = smaller(w->g.tiles - w->segment * SEGMENT_TILES, SEGMENT_TILES);
            const int64_t first = part_start(w->all, &w->g, w->segment, 0);
            const int begin = parts_before(m, w->start - first, tiles), end = parts_before(m, w->end - first, tiles);
            if (w->head < begin) w->head = begin;
            if (w->head >= end) continue;
            const int32_t *table = w->tables + (size_t)w->g.group->table * (size_t)w->table_width;
            *p = (piece){table, w->segment * SEGMENT, tiles, w->head, smaller(end - w->head, w->most_heads)};
            *g = w->g;
            w->head += p->heads;
            return 1;
        }
    return 0;
}

static char *partials_of(const scene *s, const narrow_group *g, char *partials, int segment, int head) {
    const size_t rows = (size_t)(g->group->count * shared_heads(s->model));
    return partials + s->state_bytes * (g->partials + (size_t)(segment * s->model->kv_heads + head) * rows);
}

static void compute_piece(scene *s, const layout *all, const narrow_group *g, const piece *p, const act *q, act *out,
                          char *partials) {
    const int rows = g->group->count * shared_heads(s->model), segment = p->start / SEGMENT;
    for (int head = p->head; head < p->head + p->heads; head++) {
        const int row = head * rows;
        copy_q(s, g->group, q, head, row);
        if (is_cut(all, g, head)) {
            take_in(s, g->group, row, p, head, partials_of(s, g, partials, segment, head));
            continue;
        }
        if (segment == 0) begin_rows(s, row, rows);
        take_in(s, g->group, row, p, head, NULL);
        for (int r = 0; r < rows && segment == g->segments - 1; r++)
            finish_row(s, state_of(s, row + r), out_of(s, g->group, out, head, r));
    }
}

static void narrow_groups(scene *s, const layout *all, int thread, const pk_step_inputs *step, const act *q, act *out,
                          char *partials) {
    const size_t head_bytes = 2 * SEGMENT_TILES * tile_words(s->model) * sizeof(word);
    walk w = {.all = all, .tables = step->tables, .table_width = step->table_width, .g = first_narrow(all)};
    w.start = stretch_start(all, thread);
    w.end = stretch_start(all, thread + 1);
    w.most_heads = head_bytes < PIECE_BYTES ? (int)(PIECE_BYTES / head_bytes) : 1;
    piece now, next;
    narrow_group now_of, next_of;
    for (int more = next_piece(&w, &next, &next_of); more;) {
        now = next, now_of = next_of;
        s->fetch = more = next_piece(&w, &next, &next_of);
        if (more) fetch_begin(s, &next);
        compute_piece(s, all, &now_of, &now, q, out, partials);
        if (more) fetch_rest(s);
    }
    s->fetch = 0;
}

/* Once all partials are there. The threads share the rows. */
static void merge_cut(scene *s, const layout *all, const pk_thread *thread, act *out, char *partials) {
    for (narrow_group g = first_narrow(all); g.group; g = next_narrow(all, &g)) {
        if (kept_partials(all, &g) == 0) continue;
        const int shared = shared_heads(s->model), rows = g.group->count * shared;
        int start, end;
        my_share(thread, rows * s->model->kv_heads, 1, &start, &end);
        for (int row = start; row < end; row++) {
            const int head = row / rows, r = row % rows, last = (g.group->position + r / shared) / SEGMENT;
            if (!is_cut(all, &g, head)) continue;
            begin_rows(s, 0, 1);
            for (int segment = 0; segment <= last; segment++) {
                const char *first = partials_of(s, &g, partials, segment, head);
                merge(s, state_of(s, 0), (const row_state *)(first + s->state_bytes * (size_t)r));
            }
            finish_row(s, state_of(s, 0), out_of(s, g.group, out, head, r));
        }
    }
}

/* -- wide groups ----------------------------------------------------------------------------------------------------- */

/* All rows of a group, or of a part of one, in one K/V head. */
static void attend(scene *s, const int32_t *table, const pk_group *group, int head, const act *q, act *out) {
    const int rows = group->count * shared_heads(s->model), tiles = key_tiles(group);
    copy_q(s, group, q, head, 0);
    begin_rows(s, 0, rows);
    for (int tile = 0; tile < tiles; tile += SEGMENT_TILES) {
        const piece segment = {table, tile * TILE, smaller(tiles - tile, SEGMENT_TILES), head, 1};
        take_in(s, group, 0, &segment, head, NULL);
    }
    for (int r = 0; r < rows; r++) finish_row(s, state_of(s, r), out_of(s, group, out, head, r));
}

static void wide_groups(scene *s, pk_thread *thread, const pk_step_inputs *step, const layout *all, const act *q, act *out) {
    const int positions = task_positions(s->model), kv_heads = s->model->kv_heads;
    int group = 0, before = 0; /* tasks of earlier groups */
    for (int task = team_next_task(thread);; task = team_next_task(thread)) {
        int chunks = 0;
        for (; group < all->num_groups; group++) {
            if (is_narrow(s->model, &all->groups[group])) continue;
            chunks = (all->groups[group].count + positions - 1) / positions;
            if (task < before + chunks * kv_heads) break;
            before += chunks * kv_heads;
        }
        if (group == all->num_groups) return;
        const pk_group *g = &all->groups[group];
        const int chunk = chunks - 1 - (task - before) / kv_heads; /* the longest first: threads end together */
        const int first = chunk * positions;
        const pk_group part = {g->row + first, smaller(g->count - first, positions), g->position + first, g->table};
        attend(s, step->tables + (size_t)g->table * (size_t)step->table_width, &part, (task - before) % kv_heads, q, out);
    }
}

void attention(pk_thread *thread, const pk_model *model, const pk_step_inputs *step, int layer, const pk_group *groups,
               int num_groups, const act *q, act *out, char *partials) {
    const layout all = lay_out(model, groups, num_groups, thread->count);
    scene s = {.model = model, .state_bytes = state_bytes(model)};
    s.cache = (const word *)step->cache + (size_t)layer * 2 * plane_words(model);
    s.scale = LOG2_E / __builtin_sqrtf((float)model->head_dim);
    s.states = thread->scratch;
    s.partials = s.states + s.state_bytes * most_rows(model);
    s.q = (act *)(s.partials + s.state_bytes * TILE_ROWS);
    narrow_groups(&s, &all, thread->index, step, q, out, partials);
    wide_groups(&s, thread, step, &all, q, out);
    if (all.partials == 0) return;
    team_wait(thread);
    merge_cut(&s, &all, thread, out, partials);
}
