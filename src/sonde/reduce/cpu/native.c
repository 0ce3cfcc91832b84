/* Sketches of tensors on the CPU in one reading each. Knows nothing of Python; `native.py` calls it through ctypes.

   A tensor is cut into segments of a fixed size and a segment into lanes of a fixed number, so the bits of a result
   depend on the values alone: not on how many threads there are, nor on how wide the processor's vectors are.
   The fast loop has no branches. A segment whose sums are not finite holds a NaN or an infinity, or numbers near the
   end of float32's range: it is done again by the careful loop, in double and one by one. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABI 3
#define SEGMENT 32768 /* elements; small enough for the cache, large enough for a thread to be worth waking */
#define LANES 16
#define CHAIN 16 /* float additions in a row: 15 roundings of 2**-24 each stay below 1e-6 of the sum of magnitudes */
#define PAIRED 10 /* the field of a row at which the paired sums begin */
#define INLINE static inline __attribute__((always_inline))

/* Numbers that `native.py` knows too. */
enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };
enum { SKETCH, COPY, SUBTRACT, SUBTRACT_INTO }; /* kept = x; sketch of kept - x; the same, and kept -= x */

typedef struct {
    const char *source;
    char *kept; /* float, or double where the source is double; without gaps */
    int64_t numel;
    int64_t dtype;
    int64_t act;
    int64_t first_segment;
    /* To be paired with the update, source - kept; all of float, source and kept too. NULL: not. */
    const char *grad, *first_moment, *second_moment;
    double floor; /* a second moment below it counts as that */
} tensor;

/* In the order of the first fields of a sketch's row. */
typedef struct {
    double n, nan, inf, zero, sum, sumsq, sumabs, min, max;
} sums;

/* Gradient times update, gradient times first moment, squared gradient over second moment. */
typedef struct {
    double update, moment, quotient;
} pairs;

/* Tensors of memory-mapped files may lie at any address, so nothing is read through a typed pointer. */
INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Without a branch, so that it becomes vectors on every processor. */
INLINE float half_to_float(uint32_t half) {
    uint32_t magnitude = (half & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    uint32_t is_small = -(uint32_t)(exponent == 0), is_special = -(uint32_t)(exponent == 0x0f800000);
    uint32_t usual = magnitude + 0x38000000 + (is_special & 0x38000000);
    /* Denormals by way of a normal number, so that a processor told to flush them does not. */
    float difference = as_float(magnitude + 0x38800000) - as_float(0x38800000);
    uint32_t small;
    memcpy(&small, &difference, 4);
    return as_float((small & is_small) | (usual & ~is_small) | (half & 0x8000) << 16);
}

INLINE float load(int dtype, const char *at, int64_t i) {
    if (dtype == FLOAT32) {
        float value;
        memcpy(&value, at + 4 * i, 4);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, at + 2 * i, 2);
    return dtype == BFLOAT16 ? as_float((uint32_t)bits << 16) : half_to_float(bits);
}

INLINE double load_double(int dtype, const char *at, int64_t i) {
    if (dtype != FLOAT64)
        return load(dtype, at, i);
    double value;
    memcpy(&value, at + 8 * i, 8);
    return value;
}

/* The value to count, after doing with it what is asked. */
INLINE float take(int dtype, int act, const char *restrict source, char *restrict kept, int64_t i) {
    float value = load(dtype, source, i);
    if (act == SUBTRACT || act == SUBTRACT_INTO)
        value = load(FLOAT32, kept, i) - value;
    if (act == COPY || act == SUBTRACT_INTO)
        memcpy(kept + 4 * i, &value, 4);
    return value;
}

INLINE double take_double(int dtype, int act, const char *restrict source, char *restrict kept, int64_t i) {
    if (dtype != FLOAT64)
        return take(dtype, act, source, kept, i);
    double value = load_double(dtype, source, i);
    if (act == SUBTRACT || act == SUBTRACT_INTO)
        value = load_double(dtype, kept, i) - value;
    if (act == COPY || act == SUBTRACT_INTO)
        memcpy(kept + 8 * i, &value, 8);
    return value;
}

INLINE void careful(int dtype, int act, const char *restrict source, char *restrict kept, int64_t n, sums *out) {
    sums all = {.n = (double)n, .min = INFINITY, .max = -INFINITY};
    for (int64_t i = 0; i < n; i++) {
        double value = take_double(dtype, act, source, kept, i);
        if (isnan(value)) {
            all.nan++;
        } else if (isinf(value)) {
            all.inf++;
        } else {
            all.zero += value == 0;
            all.sum += value;
            all.sumsq += value * value;
            all.sumabs += fabs(value);
            all.min = value < all.min ? value : all.min;
            all.max = value > all.max ? value : all.max;
        }
    }
    *out = all;
}

INLINE int fast(int dtype, int act, const char *restrict source, char *restrict kept, int64_t n, sums *out) {
    double sum[LANES] = {0}, sumsq[LANES] = {0}, sumabs[LANES] = {0};
    float low[LANES], high[LANES];
    int32_t zero[LANES] = {0};
    for (int l = 0; l < LANES; l++)
        low[l] = INFINITY, high[l] = -INFINITY;
    int64_t i = 0;
    while (i + LANES <= n) {
        float s[LANES] = {0}, a[LANES] = {0};
        int64_t end = i + LANES * CHAIN <= n ? i + LANES * CHAIN : n - LANES + 1;
        for (; i < end; i += LANES)
            for (int l = 0; l < LANES; l++) {
                float value = take(dtype, act, source, kept, i + l);
                s[l] += value;
                a[l] += fabsf(value);
                sumsq[l] += (double)value * (double)value; /* exact: 24 bits by 24 bits */
                low[l] = value < low[l] ? value : low[l];
                high[l] = value > high[l] ? value : high[l];
                zero[l] += value == 0;
            }
        for (int l = 0; l < LANES; l++)
            sum[l] += s[l], sumabs[l] += a[l];
    }
    sums all = {.n = (double)n, .min = INFINITY, .max = -INFINITY};
    for (; i < n; i++) {
        float value = take(dtype, act, source, kept, i);
        all.sum += value;
        all.sumabs += fabsf(value);
        all.sumsq += (double)value * (double)value;
        all.min = value < all.min ? value : all.min;
        all.max = value > all.max ? value : all.max;
        all.zero += value == 0;
    }
    for (int l = 0; l < LANES; l++) {
        all.sum += sum[l];
        all.sumabs += sumabs[l];
        all.sumsq += sumsq[l];
        all.min = low[l] < all.min ? low[l] : all.min;
        all.max = high[l] > all.max ? high[l] : all.max;
        all.zero += zero[l];
    }
    *out = all;
    return isfinite(all.sum) && isfinite(all.sumabs) && isfinite(all.sumsq);
}

/* More lanes than above: a compiler would unroll fewer before it thinks of vectors. */
#define PAIR_LANES 32

/* A non-finite value makes its sum non-finite. `subtracted`: the difference is in `kept` already. */
INLINE void paired(int subtracted, int has_moments, const tensor *t, int64_t start, int64_t n, pairs *out) {
    float floor = (float)t->floor;
    double update[PAIR_LANES] = {0}, moment[PAIR_LANES] = {0}, quotient[PAIR_LANES] = {0};
    const char *source = t->source + 4 * start, *kept = t->kept + 4 * start, *grad = t->grad + 4 * start;
    const char *first = has_moments ? t->first_moment + 4 * start : NULL;
    const char *second = has_moments ? t->second_moment + 4 * start : NULL;
#define PAIR(I, UPDATE, MOMENT, QUOTIENT)                                                                              \
    do {                                                                                                               \
        float g = load(FLOAT32, grad, I), difference = load(FLOAT32, kept, I);                                         \
        if (!subtracted)                                                                                               \
            difference -= load(FLOAT32, source, I);                                                                    \
        UPDATE -= (double)g * (double)difference;                                                                      \
        if (has_moments) {                                                                                             \
            float v = load(FLOAT32, second, I);                                                                        \
            MOMENT += (double)g * (double)load(FLOAT32, first, I);                                                     \
            QUOTIENT += (double)(g * g / (floor > v ? floor : v)); /* a NaN stays one */                               \
        }                                                                                                              \
    } while (0)
    int64_t i = 0;
    for (; i + PAIR_LANES <= n; i += PAIR_LANES)
        for (int l = 0; l < PAIR_LANES; l++)
            PAIR(i + l, update[l], moment[l], quotient[l]);
    pairs all = {0, 0, 0};
    for (; i < n; i++)
        PAIR(i, all.update, all.moment, all.quotient);
#undef PAIR
    for (int l = 0; l < PAIR_LANES; l++)
        all.update += update[l], all.moment += moment[l], all.quotient += quotient[l];
    *out = all;
}

INLINE void any_pairs(const tensor *t, int64_t start, int64_t n, pairs *out) {
    switch (2 * (t->act == SUBTRACT_INTO) + (t->first_moment != NULL)) {
    case 0: paired(0, 0, t, start, n, out); break;
    case 1: paired(0, 1, t, start, n, out); break;
    case 2: paired(1, 0, t, start, n, out); break;
    case 3: paired(1, 1, t, start, n, out); break;
    }
}

static void redo(int dtype, int act, const char *source, char *kept, int64_t n, sums *out) {
    if (act == SUBTRACT_INTO) /* the difference is there already */
        careful(FLOAT32, SKETCH, kept, NULL, n, out);
    else
        careful(dtype, act, source, kept, n, out);
}

INLINE void segment(int dtype, int act, const char *source, char *kept, int64_t n, sums *out) {
    if (!fast(dtype, act, source, kept, n, out))
        redo(dtype, act, source, kept, n, out);
}

INLINE void any_act(int dtype, int act, const char *source, char *kept, int64_t n, sums *out) {
    switch (act) {
    case SKETCH: segment(dtype, SKETCH, source, kept, n, out); break;
    case COPY: segment(dtype, COPY, source, kept, n, out); break;
    case SUBTRACT: segment(dtype, SUBTRACT, source, kept, n, out); break;
    case SUBTRACT_INTO: segment(dtype, SUBTRACT_INTO, source, kept, n, out); break;
    }
}

/* The same code for each width of vectors; which one, the processor decides when it is first asked. */
typedef struct {
    void (*segment)(int dtype, int act, const char *source, char *kept, int64_t n, sums *out);
    void (*pairs)(const tensor *t, int64_t start, int64_t n, pairs *out);
} code;
#define FOR_PROCESSOR(NAME, TARGET)                                                                                    \
    TARGET static void NAME(int dtype, int act, const char *source, char *kept, int64_t n, sums *out) {                \
        switch (dtype) {                                                                                               \
        case FLOAT32: any_act(FLOAT32, act, source, kept, n, out); break;                                              \
        case BFLOAT16: any_act(BFLOAT16, act, source, kept, n, out); break;                                            \
        case FLOAT16: any_act(FLOAT16, act, source, kept, n, out); break;                                              \
        case FLOAT64: careful(FLOAT64, act, source, kept, n, out); break;                                              \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void NAME##_pairs(const tensor *t, int64_t start, int64_t n, pairs *out) {                           \
        any_pairs(t, start, n, out);                                                                                   \
    }                                                                                                                  \
    static const code NAME##_code = {NAME, NAME##_pairs};
FOR_PROCESSOR(segment_any, )
#ifdef __x86_64__
FOR_PROCESSOR(segment_avx2, __attribute__((target("avx2"))))
FOR_PROCESSOR(segment_avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

static const code *choose(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &segment_avx512_code;
    if (__builtin_cpu_supports("avx2"))
        return &segment_avx2_code;
#endif
    return &segment_any_code;
}

static int64_t segments_of(int64_t numel) { return (numel + SEGMENT - 1) / SEGMENT; }

typedef struct {
    const tensor *tensors;
    int64_t num_tensors, num_segments;
    sums *out; /* one for each segment */
    pairs *pairs; /* the same, or NULL */
    const code *code;
    atomic_llong next;
} job;

static const tensor *owner(const job *job, int64_t number) {
    int64_t low = 0, high = job->num_tensors - 1; /* the last one that begins at or before `number` */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (job->tensors[middle].first_segment <= number)
            low = middle;
        else
            high = middle - 1;
    }
    return job->tensors + low;
}

/* What each thread does: take the next free segment, until there is none. */
static void work(void *shared) {
    static const int source_bytes[] = {4, 2, 2, 8}, kept_bytes[] = {4, 4, 4, 8};
    job *job = shared;
    for (;;) {
        int64_t number = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (number >= job->num_segments)
            return;
        const tensor *t = owner(job, number);
        int64_t first = (number - t->first_segment) * SEGMENT;
        int64_t n = t->numel - first < SEGMENT ? t->numel - first : SEGMENT;
        const char *source = t->source + first * source_bytes[t->dtype];
        char *kept = t->kept ? t->kept + first * kept_bytes[t->dtype] : NULL;
        job->code->segment((int)t->dtype, (int)t->act, source, kept, n, job->out + number);
        if (t->grad) /* while the cache still holds the segment */
            job->code->pairs(t, first, n, job->pairs + number);
    }
}

static sums joined(const sums *parts, int64_t num) {
    sums all = {.min = INFINITY, .max = -INFINITY};
    for (int64_t k = 0; k < num; k++) {
        const sums *part = parts + k;
        all.n += part->n, all.nan += part->nan, all.inf += part->inf, all.zero += part->zero;
        all.sum += part->sum, all.sumsq += part->sumsq, all.sumabs += part->sumabs;
        all.min = part->min < all.min ? part->min : all.min;
        all.max = part->max > all.max ? part->max : all.max;
    }
    return all;
}

static pairs all_pairs(const pairs *parts, int64_t num) {
    pairs all = {0, 0, 0};
    for (int64_t k = 0; k < num; k++)
        all.update += parts[k].update, all.moment += parts[k].moment, all.quotient += parts[k].quotient;
    return all;
}

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

#define EXPORTED __attribute__((visibility("default")))
#ifdef SONDE_STAMP
/* What it was built from: `hatch_build.py` looks for it in the file. */
EXPORTED const char sonde_native_stamp[] = SONDE_STAMP;
#endif
EXPORTED int64_t sonde_native_abi(void) { return ABI; }

/* The first nine fields of a row of `stride` doubles for each tensor, and for those with a gradient the paired sums: one,
   or three with moments. `run_parallel` is the GOMP_parallel of the OpenMP runtime that is loaded already, or NULL. Fills
   in `first_segment`. 0, or -1 where there is no memory. */
EXPORTED int64_t sonde_native_rows(tensor *tensors, int64_t num_tensors, double *rows, int64_t stride,
                                   parallel run_parallel, int64_t num_threads) {
    static _Atomic(const code *) chosen;
    const code *code = atomic_load(&chosen);
    if (!code)
        atomic_store(&chosen, code = choose());
    int64_t num_segments = 0, has_pairs = 0;
    for (int64_t t = 0; t < num_tensors; t++) {
        tensors[t].first_segment = num_segments;
        num_segments += segments_of(tensors[t].numel);
        has_pairs |= tensors[t].grad != NULL;
    }
    sums single, *parts = num_segments <= 1 ? &single : malloc((size_t)num_segments * sizeof(sums));
    pairs *paired_parts = has_pairs && num_segments ? malloc((size_t)num_segments * sizeof(pairs)) : NULL;
    int has_memory = parts && (paired_parts || !has_pairs || !num_segments);
    if (has_memory) {
        job job = {tensors, num_tensors, num_segments, parts, paired_parts, code, 0};
        if (num_threads > 1 && run_parallel)
            run_parallel(work, &job, (unsigned)num_threads, 0);
        else
            work(&job);
    }
    for (int64_t t = 0; t < num_tensors && has_memory; t++) {
        int64_t first = tensors[t].first_segment, num = segments_of(tensors[t].numel);
        sums all = joined(parts + first, num);
        memcpy(rows + t * stride, &all, sizeof all);
        if (tensors[t].grad && num) {
            pairs found = all_pairs(paired_parts + first, num);
            memcpy(rows + t * stride + PAIRED, &found, tensors[t].first_moment ? sizeof found : sizeof found.update);
        }
    }
    if (parts != &single)
        free(parts);
    free(paired_parts);
    return has_memory ? 0 : -1;
}
