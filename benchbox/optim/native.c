/* Functions for which torch has no kernel: each reads its arrays once, where torch would need three passes and a copy.
 *
 * The jobs of a call run on the OpenMP threads that torch has already started. Threads of our own would share the processor with
 * torch's, which spin for milliseconds after each of its operations: two such threads were no faster than one (measured).
 * GOMP_parallel is exported by all runtimes that torch is built with (libgomp, libiomp5, libomp), and torch loads its runtime into
 * the global scope, so the call finds the right one, whichever compiler is used here.
 *
 * native.py compiles with -ffp-contract=off, so that only explicit calls of fmaf are fused. With that and this order of operations
 * `adamw` gives the same bits as torch's fused AdamW kernel on whole vectors; one_pass.py verifies this before the first use.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float upcast(uint16_t value) { return from_bits((uint32_t)value << 16); }

/* Round to the nearest bfloat16, ties to even. Every NaN becomes 0xffff, as in torch's vector kernels. */
static inline uint16_t round_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t nearest = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return value != value ? 0xffffu : nearest;
}

extern void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);

/* Jobs are structs that begin with their number of elements, and are cut into parts of PART_ELEMENTS (set by native.py), the last
 * one shorter. The threads take the parts of all jobs in order. Cut here and not in Python: at 50 M parameters that saves 0.8 ms
 * of 20 (measured). */
typedef struct {
    void (*run)(const void *job, size_t start, size_t end, double *result);
    const char *jobs;
    size_t job_bytes, count, next;
    double *results; /* one for each part, or NULL */
} queue;

static void run_parts(void *data) {
    queue *parts = data;
    size_t job = 0, first = 0; /* the part with which `job` begins: a thread takes rising numbers, and searches from there on */
    for (;;) {
        size_t part = __atomic_fetch_add(&parts->next, 1, __ATOMIC_RELAXED), elements = 0;
        for (; job < parts->count; job++) {
            memcpy(&elements, parts->jobs + job * parts->job_bytes, sizeof elements);
            size_t of_job = (elements + PART_ELEMENTS - 1) / PART_ELEMENTS;
            if (part - first < of_job) break;
            first += of_job;
        }
        if (job == parts->count) return;
        size_t start = (part - first) * PART_ELEMENTS, end = start + PART_ELEMENTS;
        if (end > elements) end = elements;
        parts->run(parts->jobs + job * parts->job_bytes, start, end, parts->results ? parts->results + part : NULL);
    }
}

static void run_on_threads(queue parts, unsigned threads) {
    if (threads == 1) run_parts(&parts);
    else GOMP_parallel(run_parts, &parts, threads, 0);
}

typedef struct {
    size_t count;
    const uint16_t *values;
} squares_job;

/* Numbers of elements; a LINE of float32 fills a line of the cache. Without prefetches a processor waits for memory at the ends of
 * rows and pages: they make the sum of squares 1.4 times and the step 1.15 times as fast (measured). */
enum { LINE = 16, LANES = 2 * LINE, ROW = 16 * LANES, BLOCK = 4 * LINE, AHEAD = 1024 };

/* Sum the squares of an even number of bfloat16 values, read in pairs. Squares are exact in float32. In each row, each of 64 float32
 * accumulators adds up 16 squares, so it rounds at most 16 times, by at most 2^-24 of its sum: the relative error is below 1e-6.
 * All further sums are in double. */
static void sum_squares(const void *data, size_t start, size_t end_value, double *sum) {
    const uint32_t *restrict pairs = (const uint32_t *)(((const squares_job *)data)->values + start);
    double sums[LANES] = {0.0}, total = 0.0;
    size_t count = (end_value - start) / 2, whole = count - count % LANES;
    for (size_t row = 0; row < whole; row += ROW) {
        size_t end = row + ROW < whole ? row + ROW : whole;
        float low[LANES] = {0.0f}, high[LANES] = {0.0f};
        for (size_t i = row; i < end; i += LANES) {
            __builtin_prefetch(pairs + i + AHEAD);
            __builtin_prefetch(pairs + i + AHEAD + LINE);
#pragma omp simd
            for (size_t lane = 0; lane < LANES; lane++) {
                float low_value = from_bits(pairs[i + lane] << 16), high_value = from_bits(pairs[i + lane] & 0xffff0000u);
                low[lane] += low_value * low_value;
                high[lane] += high_value * high_value;
            }
        }
#pragma omp simd
        for (size_t lane = 0; lane < LANES; lane++) sums[lane] += (double)low[lane] + (double)high[lane];
    }
    for (size_t i = whole; i < count; i++) {
        double low_value = from_bits(pairs[i] << 16), high_value = from_bits(pairs[i] & 0xffff0000u);
        total += low_value * low_value + high_value * high_value;
    }
    for (size_t lane = 0; lane < LANES; lane++) total += sums[lane];
    *sum = total;
}

/* Write the sum of each part to `sums`: what they add up to does not depend on the number of threads. */
void sum_of_squares(const squares_job *jobs, size_t count, double *sums, unsigned threads) {
    run_on_threads((queue){sum_squares, (const char *)jobs, sizeof *jobs, count, 0, sums}, threads);
}

/* A divisor and its reciprocal, in two parts: the nearest float32 and the rest. */
typedef struct {
    float value, reciprocal, rest;
} divisor;

static inline divisor divisor_of(float value) {
    float reciprocal = 1.0f / value;
    return (divisor){value, reciprocal, (float)(1.0 / (double)value - (double)reciprocal)};
}

static const float MAX_DIVISOR = 0x1p20f;

/* Return the bits of `value / by.value` in less time than a division takes: the first quotient is wrong by less than a unit in the
 * last place and its remainder is exact, so that the corrected quotient is the nearest (Markstein, IBM J. Res. Dev. 34(1), 1990).
 * Requires a finite value, and quotients and remainders in the range of normal numbers: infinity gives NaN. */
static inline float divide(float value, divisor by) {
    float quotient = fmaf(value, by.reciprocal, value * by.rest);
    return fmaf(fmaf(-quotient, by.value, value), by.reciprocal, quotient);
}

typedef struct {
    size_t count;
    float *master, *exp_avg, *exp_avg_sq;
    const uint16_t *gradient;
    uint16_t *live;
    float divisor, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, epsilon, step_size;
} adamw_job;

/* One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101): upcast a bfloat16 gradient and divide it by the divisor of the
 * clip, step the float32 master and its moments, round the master into the bfloat16 live weight.
 *
 * The bits are those of torch's kernel for gradients that are finite, and zero or at least 2^-100. With a divisor from 1 to
 * MAX_DIVISOR, smaller ones may be wrong by a unit in the last place, and an infinite one makes the moments NaN, which are infinite
 * otherwise (the weight is NaN in either case); such a divisor is that of finite gradients.
 *
 * decay = 1 - lr * weight_decay; one_minus_beta1 = 1 - beta1; one_minus_beta2 = 1 - beta2; step_size = lr / (1 - beta1^step);
 * bias_correction2_sqrt = sqrt(1 - beta2^step), at most 1.
 *
 * On two cores of an EPYC (Zen 1) divisions and roots, and not the memory, would limit a step: in place of three divisions of each
 * element there is one. Three loops, each with vectors of one width, take 0.95 of the time of one that mixes 16 and 32 bits, and
 * with constant numbers of elements 0.9 of that (measured). */
static inline __attribute__((always_inline)) void step_elements(const adamw_job *job, const divisor *of_clip, const divisor *of_bias,
                                                                size_t start, size_t count) {
    float *restrict master = job->master + start, *restrict exp_avg = job->exp_avg + start;
    float *restrict exp_avg_sq = job->exp_avg_sq + start, scaled[BLOCK];
    const uint16_t *restrict gradient = job->gradient + start;
    uint16_t *restrict live = job->live + start;
    if (of_clip->value == 1.0f) {
#pragma omp simd
        for (size_t i = 0; i < count; i++) scaled[i] = upcast(gradient[i]);
    } else if (of_clip->value > 1.0f && of_clip->value <= MAX_DIVISOR) {
#pragma omp simd
        for (size_t i = 0; i < count; i++) scaled[i] = divide(upcast(gradient[i]), *of_clip);
    } else {
#pragma omp simd
        for (size_t i = 0; i < count; i++) scaled[i] = upcast(gradient[i]) / of_clip->value;
    }
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float g = scaled[i];
        float m = fmaf(job->one_minus_beta1, g - exp_avg[i], exp_avg[i]);
        float v = fmaf(job->one_minus_beta2 * g, g, exp_avg_sq[i] * job->beta2);
        float root = sqrtf(v), quotient = divide(root, *of_bias);
        float corrected = quotient > root ? quotient : root; /* never smaller, and NaN where the root is infinite */
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = master[i] * job->decay - job->step_size * m / (corrected + job->epsilon);
    }
#pragma omp simd
    for (size_t i = 0; i < count; i++) live[i] = round_to_bfloat16(master[i]);
}

static void step_adamw(const void *data, size_t start, size_t end, double *unused) {
    (void)unused;
    const adamw_job job = *(const adamw_job *)data;
    const divisor of_clip = divisor_of(job.divisor), of_bias = divisor_of(job.bias_correction2_sqrt);
    size_t row = start;
    for (; row + BLOCK <= end; row += BLOCK) {
        for (size_t ahead = row + AHEAD / 2; ahead < row + AHEAD / 2 + BLOCK; ahead += LINE) {
            __builtin_prefetch(job.master + ahead, 1);
            __builtin_prefetch(job.exp_avg + ahead, 1);
            __builtin_prefetch(job.exp_avg_sq + ahead, 1);
            if (ahead % (2 * LINE)) continue;
            __builtin_prefetch(job.gradient + ahead);
            __builtin_prefetch(job.live + ahead, 1);
        }
        step_elements(&job, &of_clip, &of_bias, row, BLOCK);
    }
    step_elements(&job, &of_clip, &of_bias, row, end - row);
}

void adamw(const adamw_job *jobs, size_t count, unsigned threads) {
    run_on_threads((queue){step_adamw, (const char *)jobs, sizeof *jobs, count, 0, NULL}, threads);
}
