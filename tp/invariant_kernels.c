/* Products and attention of invariant mode, element by element in the order that the definition's kernels have.
 *
 * Every element of a product is a chain of fused multiply-adds over k in float32 that begins at zero; long chains are
 * cut into chunks, whose sums are added in order. Which chunks, and whether these are the bits of the definition, a
 * trial finds out when a model is loaded. Work is split by output elements only, so that no bit depends on threads.
 *
 * Built with -ffp-contract=off: nothing is fused but what is written so.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define ROWS 12
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define ROWS 5
#else
#define LANES 4
#define ROWS 4
#endif
#define WIDTH (2 * LANES)   /* output features of a panel */
#define KEYS 64             /* of a block */
#define KEY_VECTORS (KEYS / LANES)
#define SCORE_ROWS (24 / KEY_VECTORS < 1 ? 1 : 24 / KEY_VECTORS)
#define VALUE_VECTORS 4
#define VALUE_ROWS 6
#define MOST_HEAD_DIM 256
#define DEPTH 48            /* of a stack that adds up a tree */
#define TILE_ROWS 48        /* scores that share one transposed block of keys */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const loose_vec *)from; }
INLINE void store(float *to, vec value) { *(loose_vec *)to = value; }

#if LANES == 16
INLINE vec spread(float value) { return (vec)_mm512_set1_ps(value); }
INLINE vec widened(const uint16_t *from) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)from)), 16);
}
INLINE vec fma_vec(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif LANES == 8
INLINE vec spread(float value) { return (vec)_mm256_set1_ps(value); }
INLINE vec widened(const uint16_t *from) {
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)from)), 16);
}
INLINE vec fma_vec(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
INLINE vec spread(float value) { return (vec){value, value, value, value}; }
INLINE vec widened(const uint16_t *from) {
    vec to;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t bits = (uint32_t)from[lane] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        to[lane] = value;
    }
    return to;
}
INLINE vec fma_vec(vec a, vec b, vec c) {
    for (int lane = 0; lane < LANES; lane++) c[lane] = fmaf(a[lane], b[lane], c[lane]);
    return c;
}
#endif

/* Threads: those of the OpenMP runtime that the caller's other kernels use, named at load. */
typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*thread_fn)(void);
static parallel_fn start_team;
static thread_fn thread_number, team_size;

void lockstep_threads(void *parallel, void *number, void *size) {
    start_team = (parallel_fn)parallel;
    thread_number = (thread_fn)number;
    team_size = (thread_fn)size;
}

int lockstep_width(void) { return WIDTH; }
int lockstep_rows(void) { return ROWS; }
int lockstep_lanes(void) { return LANES; }

typedef struct {
    void (*work)(const void *job, int64_t first, int64_t stop);
    const void *job;
    int64_t count;
} shared_work;

static void run_share(void *data) {
    const shared_work *shared = data;
    int64_t own = thread_number(), all = team_size();
    shared->work(shared->job, shared->count * own / all, shared->count * (own + 1) / all);
}

/* Has `work` done over 0 to `count`, cut into runs of neighbours. */
static void run(void (*work)(const void *, int64_t, int64_t), const void *job, int64_t count, int threads) {
    if (threads > count) threads = (int)count;
    if (threads <= 1 || start_team == NULL) {
        work(job, 0, count);
        return;
    }
    shared_work shared = {work, job, count};
    start_team(run_share, &shared, (unsigned)threads, 0);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;      /* [rows, stride] */
    float *packed_x;     /* by blocks of ROWS rows: [units * length, rows of the block] */
    const void *weight;  /* [panels, units * length, WIDTH], float32 or bfloat16 */
    const float *bias;   /* [out_features] or NULL */
    const int32_t *adds; /* [units]: how many sums to take after a unit; a negative one ends a subtree: -1 - sums */
    float *y;            /* [subtrees, rows, out_features] */
    int64_t stride, rows, out_features, units, length, chunk;
    int is_half;         /* whether weights are in bfloat16 */
} product;

static void pack_rows(const void *job, int64_t first, int64_t stop) {
    const product *p = job;
    int64_t features = p->units * p->length;
    for (int64_t block = first; block < stop; block++) {
        int64_t start = block * ROWS, count = p->rows - start < ROWS ? p->rows - start : ROWS;
        const float *from = p->x + start * p->stride;
        float *to = p->packed_x + start * features;
        for (int64_t k = 0; k < features; k++)
            for (int64_t row = 0; row < count; row++) *to++ = from[row * p->stride + k];
    }
}

/* One unit's product of `count` rows with a panel from element `at` on; count and type are known to the compiler. */
INLINE void unit_product(const float *x, const void *weight, int64_t at, int64_t length, int64_t chunk, const int count,
                         const int is_half, vec (*out)[2]) {
    const float *w = (const float *)weight + at;
    const uint16_t *half = (const uint16_t *)weight + at;
    for (int64_t k = 0; k < length;) {
        int64_t stop = length - k > chunk ? k + chunk : length;
        int begins = k == 0;
        vec sum[ROWS][2];
        for (int row = 0; row < count; row++) sum[row][0] = sum[row][1] = spread(0.0f);
        for (; k < stop; k++, x += count, w += WIDTH, half += WIDTH) {
            const char *ahead = is_half ? (const char *)(half + 32 * WIDTH) : (const char *)(w + 16 * WIDTH);
            for (int line = 0; line < WIDTH * (is_half ? 2 : 4); line += 64) __builtin_prefetch(ahead + line);
            vec left = is_half ? widened(half) : load(w), right = is_half ? widened(half + LANES) : load(w + LANES);
            for (int row = 0; row < count; row++) {
                vec each = spread(x[row]);
                sum[row][0] = fma_vec(each, left, sum[row][0]);
                sum[row][1] = fma_vec(each, right, sum[row][1]);
            }
        }
        for (int row = 0; row < count; row++)
            for (int half = 0; half < 2; half++)
                out[row][half] = begins ? sum[row][half] : out[row][half] + sum[row][half];
    }
}

static void store_rows(const product *p, vec (*sums)[2], int64_t subtree, int64_t start, int count, int64_t column) {
    int64_t left = p->out_features - column;
    for (int row = 0; row < count; row++) {
        float *y = p->y + (subtree * p->rows + start + row) * p->out_features + column;
        float values[WIDTH];
        store(values, sums[row][0]);
        store(values + LANES, sums[row][1]);
        int wide = left < WIDTH ? (int)left : WIDTH;
        if (p->bias != NULL)
            for (int at = 0; at < wide; at++) values[at] = values[at] + p->bias[column + at];
        memcpy(y, values, sizeof(float) * (size_t)wide);
    }
}

INLINE void panel_rows(const product *p, int64_t panel, int64_t start, const int count, const int is_half) {
    int64_t features = p->units * p->length, at = panel * features * WIDTH;
    const float *x = p->packed_x + start * features;
    vec stack[DEPTH][ROWS][2];
    int depth = 0;
    int64_t subtree = 0;
    for (int64_t unit = 0; unit < p->units; unit++, x += p->length * count, at += p->length * WIDTH) {
        unit_product(x, p->weight, at, p->length, p->chunk, count, is_half, stack[depth++]);
        int adds = p->adds[unit], ends = adds < 0;
        if (ends) adds = -1 - adds;
        for (; adds > 0; adds--) {
            depth--;
            for (int row = 0; row < count; row++)
                for (int half = 0; half < 2; half++)
                    stack[depth - 1][row][half] = stack[depth - 1][row][half] + stack[depth][row][half];
        }
        if (ends) {
            store_rows(p, stack[0], subtree++, start, count, panel * WIDTH);
            depth = 0;
        }
    }
}

#define PANEL_ROWS(N) \
    static __attribute__((noinline)) void panel_rows_##N(const product *p, int64_t panel, int64_t start) { \
        if (p->is_half) \
            panel_rows(p, panel, start, N, 1); \
        else \
            panel_rows(p, panel, start, N, 0); \
    }
PANEL_ROWS(1) PANEL_ROWS(2) PANEL_ROWS(3) PANEL_ROWS(4)
#if ROWS > 4
PANEL_ROWS(5)
#endif
#if ROWS > 5
PANEL_ROWS(6) PANEL_ROWS(7) PANEL_ROWS(8) PANEL_ROWS(9) PANEL_ROWS(10) PANEL_ROWS(11) PANEL_ROWS(12)
#endif
static void (*const by_rows[])(const product *, int64_t, int64_t) = {
    NULL, panel_rows_1, panel_rows_2, panel_rows_3, panel_rows_4,
#if ROWS > 4
    panel_rows_5,
#endif
#if ROWS > 5
    panel_rows_6, panel_rows_7, panel_rows_8, panel_rows_9, panel_rows_10, panel_rows_11, panel_rows_12,
#endif
};

static void run_panels(const void *job, int64_t first, int64_t stop) {
    const product *p = job;
    for (int64_t panel = first; panel < stop; panel++)
        for (int64_t start = 0; start < p->rows; start += ROWS)
            by_rows[p->rows - start < ROWS ? p->rows - start : ROWS](p, panel, start);
}

/* Products of `rows` rows with the units of a packed weight, added up along the tree; see `product`. */
void lockstep_product(const float *x, int64_t stride, int64_t rows, float *scratch, const void *weight,
                      int is_half, const float *bias, const int32_t *adds, int64_t units, int64_t length, int64_t chunk,
                      int64_t out_features, float *y, int threads) {
    product p = {x, scratch, weight, bias, adds, y, stride, rows, out_features, units, length, chunk, is_half};
    int64_t blocks = (rows + ROWS - 1) / ROWS;
    if (rows == 1)
        p.packed_x = (float *)x;
    else
        run(pack_rows, &p, blocks, blocks > 4 ? threads : 1);
    run(run_panels, &p, (out_features + WIDTH - 1) / WIDTH, threads);
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* A tile: the queries of some neighbouring rows of a batch, of one sequence, and the blocks that they see some of. */
typedef struct {
    int64_t row;         /* the first */
    int64_t positions;   /* how many rows */
    int64_t at;          /* the first row's position in its sequence */
    int64_t first_block;
    int64_t blocks;
    int64_t slots;       /* where the first block's slots begin in the table of slots */
    int64_t weights;     /* where its weights begin: [kv_heads, positions * group, blocks * KEYS] */
} tile;

typedef struct {
    const tile *tiles;
    const int64_t *slots;     /* the pool's slot of each key */
    const float *queries;     /* [T, query_stride], float32 */
    const void *pool;         /* keys or values, [slots, kv_heads, head_dim] */
    float *weights, *outputs; /* outputs: [T, heads, head_dim] */
    int64_t tasks, query_stride, kv_heads, group, head_dim, window, sum_lanes;
    float scale;
    int is_half;              /* whether the pool is in bfloat16 */
} attention;

INLINE const float *wide_row(const attention *a, int64_t slot, int64_t head, float *buffer) {
    int64_t offset = (slot * a->kv_heads + head) * a->head_dim;
    if (!a->is_half) return (const float *)a->pool + offset;
    const uint16_t *half = (const uint16_t *)a->pool + offset;
    for (int64_t at = 0; at < a->head_dim; at++) {
        uint32_t bits = (uint32_t)half[at] << 16;
        memcpy(buffer + at, &bits, sizeof bits);
    }
    return buffer;
}

#if defined(__clang__) || !defined(__GNUC__)
static void turn(const float *rows[LANES], int64_t first, float *to) {
    for (int d = 0; d < LANES; d++)
        for (int key = 0; key < LANES; key++) to[d * KEYS + key] = rows[key][first + d];
}
#else
typedef int32_t places __attribute__((vector_size(4 * LANES)));
/* Shuffles LANES rows of LANES elements so often that rows and columns have changed places. */
static void turn(const float *rows[LANES], int64_t first, float *to) {
    places low, high;
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = lane / 2 + (lane % 2) * LANES;
        high[lane] = low[lane] + LANES / 2;
    }
    vec from[LANES], next[LANES];
    for (int row = 0; row < LANES; row++) from[row] = load(rows[row] + first);
    for (int round = 1; round < LANES; round *= 2) {
        for (int row = 0; row < LANES / 2; row++) {
            next[2 * row] = __builtin_shuffle(from[row], from[row + LANES / 2], low);
            next[2 * row + 1] = __builtin_shuffle(from[row], from[row + LANES / 2], high);
        }
        memcpy(from, next, sizeof from);
    }
    for (int row = 0; row < LANES; row++) store(to + row * KEYS, from[row]);
}
#endif

INLINE void score_rows(const float *const *queries, const float *keys, int64_t head_dim, const int count,
                       float *const *scores) {
    vec sum[SCORE_ROWS][KEY_VECTORS];
    for (int row = 0; row < count; row++)
        for (int part = 0; part < KEY_VECTORS; part++) sum[row][part] = spread(0.0f);
    for (int64_t d = 0; d < head_dim; d++)
        for (int row = 0; row < count; row++) {
            vec each = spread(queries[row][d]);
            for (int part = 0; part < KEY_VECTORS; part++)
                sum[row][part] = fma_vec(each, load(keys + d * KEYS + part * LANES), sum[row][part]);
        }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < KEY_VECTORS; part++) store(scores[row] + part * LANES, sum[row][part]);
}

/* The scores of rows `start` to `stop` of a tile, relative to each row's largest. */
static void score_part(const attention *a, const tile *t, int64_t head, int64_t start, int64_t stop) {
    int64_t all = t->positions * a->group, keys = t->blocks * KEYS, head_dim = a->head_dim;
    float turned[MOST_HEAD_DIM * KEYS], wide[LANES][MOST_HEAD_DIM], scaled[TILE_ROWS][MOST_HEAD_DIM];
    float *scores = a->weights + t->weights + head * all * keys;
    for (int64_t row = start; row < stop; row++) {
        const float *query = a->queries + (t->row + row / a->group) * a->query_stride;
        query += (head * a->group + row % a->group) * head_dim;
        for (int64_t d = 0; d < head_dim; d++) scaled[row - start][d] = query[d] * a->scale;
    }
    for (int64_t block = 0; block < t->blocks; block++) {
        const int64_t *slots = a->slots + t->slots + block * KEYS;
        for (int64_t key = 0; key < KEYS; key += LANES) {
            const float *rows[LANES];
            for (int lane = 0; lane < LANES; lane++) rows[lane] = wide_row(a, slots[key + lane], head, wide[lane]);
            for (int64_t d = 0; d < head_dim; d += LANES) turn(rows, d, turned + d * KEYS + key);
        }
        for (int64_t row = start; row < stop;) {
            const float *queries[SCORE_ROWS];
            float *into[SCORE_ROWS];
            int count = stop - row < SCORE_ROWS ? (int)(stop - row) : SCORE_ROWS;
            for (int at = 0; at < count; at++) {
                queries[at] = scaled[row - start + at];
                into[at] = scores + (row + at) * keys + block * KEYS;
            }
            switch (count) {
#if SCORE_ROWS >= 6
            case 6: score_rows(queries, turned, head_dim, 6, into); break;
            case 5: score_rows(queries, turned, head_dim, 5, into); break;
            case 4: score_rows(queries, turned, head_dim, 4, into); break;
#endif
#if SCORE_ROWS >= 3
            case 3: score_rows(queries, turned, head_dim, 3, into); break;
            case 2: score_rows(queries, turned, head_dim, 2, into); break;
#endif
            default: score_rows(queries, turned, head_dim, 1, into); count = 1;
            }
            row += count;
        }
    }
    int64_t first_key = t->first_block * KEYS;
    for (int64_t row = start; row < stop; row++) {
        float *of_row = scores + row * keys;
        int64_t at = t->at + row / a->group;
        int64_t seen = at + 1 - first_key, unseen = a->window > 0 ? at - a->window + 1 - first_key : 0;
        for (int64_t key = 0; key < unseen && key < keys; key++) of_row[key] = -INFINITY;
        for (int64_t key = seen; key < keys; key++) of_row[key] = -INFINITY;
        float most = -INFINITY;
        for (int64_t key = 0; key < keys; key++) most = of_row[key] > most ? of_row[key] : most;
        for (int64_t key = 0; key < keys; key++) of_row[key] = of_row[key] - most;
    }
}

INLINE void value_rows(const float *const *values, const float *weights, int64_t keys, int64_t first, const int parts,
                       const int count, float (*to)[MOST_HEAD_DIM + 1]) {
    vec sum[VALUE_ROWS][VALUE_VECTORS];
    for (int row = 0; row < count; row++)
        for (int part = 0; part < parts; part++) sum[row][part] = spread(0.0f);
    for (int key = 0; key < KEYS; key++) {
        vec value[VALUE_VECTORS];
        for (int part = 0; part < parts; part++) value[part] = load(values[key] + first + part * LANES);
        for (int row = 0; row < count; row++) {
            vec each = spread(weights[row * keys + key]);
            for (int part = 0; part < parts; part++) sum[row][part] = fma_vec(each, value[part], sum[row][part]);
        }
    }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < parts; part++) store(to[row] + first + part * LANES, sum[row][part]);
}

#define VALUE_CASE(N) \
    case N: \
        for (; first + VALUE_VECTORS * LANES <= head_dim; first += VALUE_VECTORS * LANES) \
            value_rows(values, weights, keys, first, VALUE_VECTORS, N, to); \
        for (; first < head_dim; first += LANES) value_rows(values, weights, keys, first, 1, N, to); \
        break;

static void value_block(const float *const *values, const float *weights, int64_t keys, int64_t head_dim, int count,
                        float (*to)[MOST_HEAD_DIM + 1]) {
    int64_t first = 0;
    switch (count) {
        VALUE_CASE(1) VALUE_CASE(2) VALUE_CASE(3) VALUE_CASE(4) VALUE_CASE(5) VALUE_CASE(6)
    }
}

/* The sum of a block's weights: four registers side by side, each other four added to them, then register by register,
 * then lane by lane; a register has `lanes` elements. */
INLINE float weight_sum(const float *weights, int64_t lanes) {
    float sums[4 * 16], total = 0.0f;
    memcpy(sums, weights, sizeof(float) * (size_t)(4 * lanes));
    for (int64_t at = 4 * lanes; at < KEYS; at += 4 * lanes)
        for (int64_t lane = 0; lane < 4 * lanes; lane++) sums[lane] = sums[lane] + weights[at + lane];
    for (int64_t part = 1; part < 4; part++)
        for (int64_t lane = 0; lane < lanes; lane++) sums[lane] = sums[lane] + sums[part * lanes + lane];
    for (int64_t lane = 0; lane < lanes; lane++) total = total + sums[lane];
    return total;
}

typedef struct {
    float sums[VALUE_ROWS][MOST_HEAD_DIM + 1]; /* outputs, and the sum of weights at `head_dim` */
    int level;
    int64_t place;
} node;

/* Adds up or takes upwards what lies at the top of the stack; at the end everything, before it what has its partner. */
static int settle(node *stack, int depth, int count, int64_t head_dim, int at_end) {
    for (;;) {
        node *top = stack + depth - 1, *below = top - 1;
        int has_partner = depth > 1 && below->level == top->level && below->place == top->place - 1 && top->place % 2;
        if (has_partner) {
            for (int row = 0; row < count; row++)
                for (int64_t d = 0; d <= head_dim; d++) below->sums[row][d] = below->sums[row][d] + top->sums[row][d];
            depth--;
            top = below;
        } else if (at_end ? depth == 1 : top->place % 2 == 0)
            return depth;
        top->level++;
        top->place /= 2;
    }
}

/* The outputs of rows `start` to `stop` of a tile, at most VALUE_ROWS. */
static void value_part(const attention *a, const tile *t, int64_t head, int64_t start, int64_t stop) {
    int64_t all = t->positions * a->group, keys = t->blocks * KEYS, head_dim = a->head_dim;
    int count = (int)(stop - start), depth = 0;
    const float *weights = a->weights + t->weights + (head * all + start) * keys;
    float wide[KEYS][MOST_HEAD_DIM];
    node stack[DEPTH];
    for (int64_t block = 0; block < t->blocks; block++) {
        const int64_t *slots = a->slots + t->slots + block * KEYS;
        const float *values[KEYS];
        for (int key = 0; key < KEYS; key++) values[key] = wide_row(a, slots[key], head, wide[key]);
        node *top = stack + depth++;
        top->level = 0;
        top->place = t->first_block + block;
        value_block(values, weights + block * KEYS, keys, head_dim, count, top->sums);
        for (int row = 0; row < count; row++)
            top->sums[row][head_dim] = weight_sum(weights + row * keys + block * KEYS, a->sum_lanes);
        depth = settle(stack, depth, count, head_dim, block + 1 == t->blocks);
    }
    for (int row = 0; row < count; row++) {
        int64_t at = start + row;
        float *output = a->outputs + (t->row + at / a->group) * a->kv_heads * a->group * head_dim;
        output += (head * a->group + at % a->group) * head_dim;
        const float *sums = stack[0].sums[row];
        for (int64_t d = 0; d < head_dim; d++) output[d] = sums[d] / sums[head_dim];
    }
}

typedef struct {
    const attention *a;
    void (*part)(const attention *, const tile *, int64_t, int64_t, int64_t);
    int64_t tiles, height;
} parts_job;

/* Parts `first` to `stop`, counted over tiles, heads and runs of `height` rows. */
static void run_parts(const void *job, int64_t first, int64_t stop) {
    const parts_job *j = job;
    int64_t number = 0;
    for (int64_t at = 0; at < j->tiles && number < stop; at++) {
        const tile *t = j->a->tiles + at;
        int64_t rows = t->positions * j->a->group, runs = (rows + j->height - 1) / j->height;
        for (int64_t part = 0; part < runs * j->a->kv_heads; part++, number++) {
            if (number < first || number >= stop) continue;
            int64_t start = part % runs * j->height;
            j->part(j->a, t, part / runs, start, start + j->height < rows ? start + j->height : rows);
        }
    }
}

static void run_attention(const attention *a, int64_t tiles, int64_t height,
                          void (*part)(const attention *, const tile *, int64_t, int64_t, int64_t), int threads) {
    parts_job job = {a, part, tiles, height};
    int64_t count = 0, work = 0;
    for (int64_t at = 0; at < tiles; at++) {
        int64_t rows = a->tiles[at].positions * a->group;
        count += (rows + height - 1) / height * a->kv_heads;
        work += rows * a->kv_heads * a->tiles[at].blocks;
    }
    run(run_parts, &job, count, work > 16 ? threads : 1);
}

/* Scores of all tiles, less each row's largest; -inf where nothing is seen. */
void lockstep_scores(const tile *tiles, int64_t count, const int64_t *slots, const float *queries, int64_t query_stride,
                     const void *keys, int is_half, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t window,
                     double scale, float *weights, int threads) {
    attention a = {tiles,  slots,        queries,  keys,  weights,  NULL,   0,
                   query_stride, kv_heads, group, head_dim, window, 0, (float)scale, is_half};
    run_attention(&a, count, TILE_ROWS, score_part, threads);
}

/* Outputs of all tiles, from the exponentials of the scores. */
void lockstep_outputs(const tile *tiles, int64_t count, const int64_t *slots, const void *values, int is_half,
                      int64_t kv_heads, int64_t group, int64_t head_dim, int64_t sum_lanes, const float *weights,
                      float *outputs, int threads) {
    attention a = {tiles, slots, NULL, values, (float *)weights, outputs, 0,
                   0, kv_heads, group, head_dim, 0, sum_lanes, 0.0f, is_half};
    run_attention(&a, count, VALUE_ROWS, value_part, threads);
}
