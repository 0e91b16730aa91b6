/* The C backend without Python, to be compiled with sanitizers: a random network, three requests, steps of every kind.

   Each request is first computed alone, in one pass on one thread; then all of them in steps of random spans on several
   threads, with a block lost and repaired on the way. Every logit must have the same bits. All memory that the library is
   given is of exactly the size that it may touch, so that a step beyond is seen. */

#include <stdio.h>
#include <stdlib.h>

#include "pk.h"

/* step.c's, as Python calls them */
typedef struct pk_engine pk_engine;
pk_engine *pk_open(const pk_model *model, int threads);
void pk_close(pk_engine *e);
void pk_set_quantized_rows(pk_engine *e, int rows);
int pk_step(pk_engine *e, const pk_step_inputs *step);

enum { HIDDEN = 96, INTERMEDIATE = 160, HEADS = 6, KV_HEADS = 2, LAYERS = 2, VOCAB = 171 };
enum { REQUESTS = 3, MOST = 200, BLOCK_SIZE = 32, WIDTH = 7, BLOCKS = REQUESTS * WIDTH + 1 };
static const int length[REQUESTS] = {200, 61, 33};
static int head_dim;

#ifndef TOO_FAR
#define TOO_FAR 0 /* 1: a fault, to see that it is seen */
#endif

static void *exactly(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    return memory;
}

/* For as long as the process lives: known to the leak checker by this list. */
static void *kept[1024];

static void *keep(size_t bytes) {
    static int count = 0;
    return kept[count++] = exactly(bytes);
}

static uint32_t random_bits(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static int below(int n) { return (int)(random_bits() % (uint32_t)n); }
static float uniform(void) { return (float)random_bits() / 2147483648.0f - 1; }

static float *random_floats(size_t count, float about, float scale) {
    float *values = keep(count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = about + scale * uniform();
    return values;
}

/* -- a network --------------------------------------------------------------------------------------------------- */

static word *random_words(size_t count, float scale) {
    word *words = keep(count * sizeof *words);
    for (size_t i = 0; i < count; i++) {
#if PK_BF16
        words[i] = (word)bf16_of(scale * uniform()) | (word)bf16_of(scale * uniform()) << 16;
#else
        words[i] = scale * uniform();
#endif
    }
    return words;
}

static pk_matrix random_matrix(int columns, int depth, int has_bias) {
    pk_matrix w = {.columns = columns, .depth = depth};
    w.panels = random_words((size_t)columns * (size_t)depth / DEPTH, 0.2f);
    if (has_bias) w.bias = random_floats((size_t)columns, 0, 0.1f);
    return w;
}

/* In panels of all kinds by turns, and nothing else. */
static pk_matrix random_quantized(int columns, int depth) {
    static const uint8_t kinds[5] = {2, 3, 8, 12, 14};
    const int panels = columns / PANEL, groups = depth / GROUP;
    pk_matrix w = {.columns = columns, .depth = depth};
    uint8_t *kind = keep((size_t)panels);
    int64_t *at = keep(sizeof *at * (size_t)panels);
    size_t bytes = 0;
    for (int i = 0; i < panels; i++) {
        kind[i] = kinds[i % 5];
        at[i] = (int64_t)bytes;
        bytes += quantized_group_bytes(kind[i]) * (size_t)groups;
    }
    uint8_t *data = keep(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(random_bits() >> 24);
    for (int i = 0; i < panels; i++) /* halves about 0.001, wherever a kind has them: the rest is still random */
        for (int g = 0; g < groups; g++) {
            const size_t size = quantized_group_bytes(kind[i]);
            uint8_t *group = data + at[i] + (size_t)g * size;
            const size_t first = kind[i] == 8 ? 1024 : kind[i] == 14 ? 768 : 512;
            const size_t halves = kind[i] == 3 || kind[i] == 12 ? 64 : 32;
            for (size_t h = 0; h < halves; h++) memcpy(group + first + 2 * h, &(uint16_t){(uint16_t)(0x1400 + below(256))}, 2);
        }
    w.kind = kind, w.panel_at = at, w.quantized = (const char *)data;
    return w;
}

static pk_model random_model(int is_quantized) {
    const int qkv = (HEADS + 2 * KV_HEADS) * head_dim, mixed = HEADS * head_dim;
    pk_matrix (*matrix)(int, int) = random_quantized;
    pk_layer *layers = keep(LAYERS * sizeof *layers);
    for (int i = 0; i < LAYERS; i++) {
        pk_layer *l = &layers[i];
        l->attention_norm = random_floats(HIDDEN, 1, 0.2f);
        l->mlp_norm = random_floats(HIDDEN, 1, 0.2f);
        l->qk_norm = i ? random_floats((size_t)(HEADS + KV_HEADS) * (size_t)head_dim, 1, 0.2f) : NULL;
        l->qkv = is_quantized ? matrix(qkv, HIDDEN) : random_matrix(qkv, HIDDEN, 1);
        l->o = is_quantized ? matrix(HIDDEN, mixed) : random_matrix(HIDDEN, mixed, 0);
        l->gate_up = is_quantized ? matrix(2 * INTERMEDIATE, HIDDEN) : random_matrix(2 * INTERMEDIATE, HIDDEN, 1);
        l->down = is_quantized ? matrix(HIDDEN, INTERMEDIATE) : random_matrix(HIDDEN, INTERMEDIATE, 0);
    }
    return (pk_model){.hidden = HIDDEN, .intermediate = INTERMEDIATE, .heads = HEADS, .kv_heads = KV_HEADS,
                      .head_dim = head_dim, .layers = LAYERS, .vocab = VOCAB + TOO_FAR, .block_size = BLOCK_SIZE, .eps = 1e-5f,
                      .embedding = random_words(VOCAB * HIDDEN / DEPTH, 1), .norm = random_floats(HIDDEN, 1, 0.2f),
                      .head = random_matrix((VOCAB + PANEL - 1) / PANEL * PANEL, HIDDEN, 0), .layer = layers};
}

/* Of rank 64; the first layer's o and the last one's gate and up are left alone. */
static pk_delta *random_deltas(const pk_model *m) {
    pk_delta *deltas = memset(keep(4 * LAYERS * sizeof *deltas), 0, 4 * LAYERS * sizeof *deltas);
    for (int i = 0; i < 4 * LAYERS; i++) {
        const pk_layer *l = &m->layer[i / 4];
        const pk_matrix *w = (const pk_matrix *[]){&l->qkv, &l->o, &l->gate_up, &l->down}[i % 4];
        if (i == 1 || i == 4 * LAYERS - 2) continue;
        deltas[i] = (pk_delta){random_matrix(64, w->depth, 0), random_matrix(w->columns, 64, 0)};
    }
    return deltas;
}

/* -- steps ------------------------------------------------------------------------------------------------------- */

typedef struct {
    int request, start, end;
} span;

static int64_t token[REQUESTS][MOST];
static int32_t block_of[REQUESTS][WIDTH];
static const float *cos_of, *sin_of;
static const pk_delta *deltas_of[REQUESTS]; /* NULL: the base model */

/* Logits of every row of the spans, or of their last rows alone, to logits[request][position][VOCAB]. */
static void step(pk_engine *e, char *cache, const span *spans, int count, int all, float *logits) {
    int rows = 0, wanted = 0;
    for (int i = 0; i < count; i++) rows += spans[i].end - spans[i].start;
    const size_t n = (size_t)rows, s = (size_t)count;
    int64_t *ids = exactly(8 * n), *positions = exactly(8 * n), *slots = exactly(8 * n), *logit_rows = exactly(8 * n);
    int32_t *owner = exactly(4 * n), *tables = exactly(4 * s * WIDTH);
    pk_group *groups = exactly(sizeof *groups * s), *last = exactly(sizeof *last * s);
    int row = 0;
    for (int i = 0; i < count; i++) {
        const int r = spans[i].request, size = spans[i].end - spans[i].start, kept = all ? size : 1;
        memcpy(tables + i * WIDTH, block_of[r], sizeof block_of[r]);
        groups[i] = (pk_group){row, size, spans[i].start, i};
        last[i] = (pk_group){wanted, kept, spans[i].end - kept, i};
        for (int p = spans[i].start; p < spans[i].end; p++, row++) {
            ids[row] = token[r][p], positions[row] = p, owner[row] = r;
            slots[row] = block_of[r][p / BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE;
            if (p >= spans[i].end - kept) logit_rows[wanted++] = row;
        }
    }
    int32_t *changed[REQUESTS], *changed_logits[REQUESTS];
    pk_adapter adapters[REQUESTS];
    int num_adapters = 0;
    for (int r = 0; r < REQUESTS; r++) {
        pk_adapter a = {.deltas = deltas_of[r]};
        int32_t *mine = changed[r] = exactly(4 * n), *my_logits = changed_logits[r] = exactly(4 * n);
        for (int i = 0; i < rows; i++)
            if (owner[i] == r) mine[a.num_rows++] = i;
        for (int i = 0; i < wanted; i++)
            if (owner[logit_rows[i]] == r) my_logits[a.num_logits++] = i;
        a.rows = mine, a.logits = my_logits;
        if (a.deltas && a.num_rows) adapters[num_adapters++] = a;
    }
    float *out = exactly(sizeof *out * (size_t)wanted * VOCAB);
    double seconds[PK_TIMES] = {0};
    pk_step_inputs inputs = {ids, positions, slots, groups, last, logit_rows, tables, adapters, cache, cos_of, sin_of, out,
                             seconds, rows, count, count, wanted, WIDTH, num_adapters};
    if (pk_step(e, &inputs) != 0) abort();
    for (int i = 0; i < wanted; i++)
        memcpy(logits + ((size_t)owner[logit_rows[i]] * MOST + (size_t)positions[logit_rows[i]]) * VOCAB,
               out + (size_t)i * VOCAB, sizeof *out * VOCAB);
    void *buffers[] = {ids, positions, slots, logit_rows, owner, tables, groups, last, out};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
    for (int r = 0; r < REQUESTS; r++) free(changed[r]), free(changed_logits[r]);
}

static void check(const float *found, const float *expected, int request, int start, int end) {
    for (size_t p = (size_t)request * MOST + (size_t)start; p < (size_t)request * MOST + (size_t)end; p++)
        for (size_t i = p * VOCAB; i < (p + 1) * VOCAB; i++)
            if (memcmp(&found[i], &expected[i], sizeof(float)) || !__builtin_isfinite(found[i])) {
                fprintf(stderr, "request %d, position %zu: %g, alone %g\n", request, p % MOST, found[i], expected[i]);
                exit(1);
            }
}

static void run(const pk_model *m, int threads, int with_adapter) {
    const size_t logits_size = sizeof(float) * REQUESTS * MOST * VOCAB, bytes = block_words(m) * sizeof(word);
    float *alone = exactly(logits_size), *together = exactly(logits_size);
    char *cache = calloc(BLOCKS, bytes);
    const pk_delta *deltas = random_deltas(m);
    pk_engine *one = pk_open(m, 1), *many = pk_open(m, threads);
    if (!cache || !one || !many) abort();
    deltas_of[1] = with_adapter ? deltas : NULL;
    for (int r = 0; r < REQUESTS; r++) step(one, cache, &(span){r, 0, length[r]}, 1, 1, alone);
    memset(cache, 0, bytes * BLOCKS);
    for (int done[REQUESTS] = {0}, left = 1; left;) {
        static const int sizes[] = {1, 1, 2, 3, 7, 13, 49, 100};
        span spans[REQUESTS];
        int count = left = 0;
        for (int r = 0; r < REQUESTS; r++) {
            int size = below(4) ? sizes[below(8)] : 0;
            if (size > length[r] - done[r]) size = length[r] - done[r];
            if (size) spans[count++] = (span){r, done[r], done[r] + size};
            left |= (done[r] += size) < length[r];
        }
        if (!count) continue;
        step(many, cache, spans, count, below(2), together);
        for (int i = 0; i < count; i++) check(together, alone, spans[i].request, spans[i].end - 1, spans[i].end);
    }
    memset(cache + bytes * (size_t)block_of[0][1], 0, bytes); /* lost: repaired beside the last rows of all */
    const span repair[] = {{0, 32, 64}, {0, 199, 200}, {1, 60, 61}, {2, 0, 33}};
    step(many, cache, repair, 4, 1, together);
    for (int i = 0; i < 4; i++) check(together, alone, repair[i].request, repair[i].start, repair[i].end);
    pk_close(one), pk_close(many);
    free(alone), free(together), free(cache);
}

int main(void) {
    for (int r = 0, block = 1; r < REQUESTS; r++) {
        for (int i = 0; i < MOST; i++) token[r][i] = below(VOCAB);
        for (int i = 0; i < WIDTH; i++) block_of[r][i] = block++;
    }
    for (head_dim = 64; head_dim <= 128; head_dim += 32) {
        cos_of = random_floats((size_t)(MOST * head_dim / 2), 0, 1);
        sin_of = random_floats((size_t)(MOST * head_dim / 2), 0, 1);
        for (int is_quantized = 0; is_quantized < 2; is_quantized++) {
            const pk_model model = random_model(is_quantized);
            for (int threads = 2; threads <= 3; threads++) run(&model, threads, threads == 3);
        }
    }
    puts("sound");
    return 0;
}
