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

typedef struct {
    void (*run)(void *job);
    char *jobs;
    size_t job_bytes, count, next;
} queue;

static void run_jobs(void *data) {
    queue *jobs = data;
    size_t index;
    while ((index = __atomic_fetch_add(&jobs->next, 1, __ATOMIC_RELAXED)) < jobs->count)
        jobs->run(jobs->jobs + index * jobs->job_bytes);
}

static void run_on_threads(queue jobs, unsigned threads) {
    if (threads == 1) run_jobs(&jobs);
    else GOMP_parallel(run_jobs, &jobs, threads, 0);
}

typedef struct {
    const uint32_t *pairs;
    size_t count;
    double sum;
} squares_job;

/* Numbers of elements; a LINE of float32 fills a line of the cache. Without prefetches a processor waits for memory at the ends of
 * rows and pages: they make the sum of squares 1.4 times and the step 1.15 times as fast (measured). */
enum { LINE = 16, LANES = 2 * LINE, ROW = 16 * LANES, BLOCK = 4 * LINE, AHEAD = 1024 };

/* Sum the squares of an even number of bfloat16 values, two per element of `pairs`. Squares are exact in float32. In each row,
 * each of 64 float32 accumulators adds up 16 squares, so it rounds at most 16 times, by at most 2^-24 of its sum: the relative
 * error is below 1e-6. All further sums are in double. */
static void sum_squares(void *data) {
    squares_job *job = data;
    const uint32_t *restrict pairs = job->pairs;
    double sums[LANES] = {0.0}, total = 0.0;
    size_t whole = job->count - job->count % LANES;
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
    for (size_t i = whole; i < job->count; i++) {
        double low_value = from_bits(pairs[i] << 16), high_value = from_bits(pairs[i] & 0xffff0000u);
        total += low_value * low_value + high_value * high_value;
    }
    for (size_t lane = 0; lane < LANES; lane++) total += sums[lane];
    job->sum = total;
}

void sum_of_squares(squares_job *jobs, size_t count, unsigned threads) {
    run_on_threads((queue){sum_squares, (char *)jobs, sizeof *jobs, count, 0}, threads);
}

typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
    const uint16_t *gradient;
    uint16_t *live;
    size_t count;
    float divisor, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, epsilon, step_size;
} adamw_job;

/* One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101): upcast a bfloat16 gradient and divide it by the divisor of the
 * clip, step the float32 master and its moments, round the master into the bfloat16 live weight.
 *
 * decay = 1 - lr * weight_decay; one_minus_beta1 = 1 - beta1; one_minus_beta2 = 1 - beta2; step_size = lr / (1 - beta1^step);
 * bias_correction2_sqrt = sqrt(1 - beta2^step). */
static void step_adamw(void *data) {
    const adamw_job job = *(adamw_job *)data;
    float *restrict master = job.master, *restrict exp_avg = job.exp_avg, *restrict exp_avg_sq = job.exp_avg_sq;
    const uint16_t *restrict gradient = job.gradient;
    uint16_t *restrict live = job.live;
    for (size_t row = 0; row < job.count; row += BLOCK) {
        size_t end = row + BLOCK < job.count ? row + BLOCK : job.count;
        for (size_t ahead = row + AHEAD / 2; ahead < row + AHEAD / 2 + BLOCK; ahead += LINE) {
            __builtin_prefetch(master + ahead, 1);
            __builtin_prefetch(exp_avg + ahead, 1);
            __builtin_prefetch(exp_avg_sq + ahead, 1);
            if (ahead % (2 * LINE)) continue;
            __builtin_prefetch(gradient + ahead);
            __builtin_prefetch(live + ahead, 1);
        }
#pragma omp simd
        for (size_t i = row; i < end; i++) {
            float g = upcast(gradient[i]) / job.divisor;
            float m = fmaf(job.one_minus_beta1, g - exp_avg[i], exp_avg[i]);
            float v = fmaf(job.one_minus_beta2 * g, g, exp_avg_sq[i] * job.beta2);
            float p = master[i] * job.decay - job.step_size * m / (sqrtf(v) / job.bias_correction2_sqrt + job.epsilon);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            master[i] = p;
            live[i] = round_to_bfloat16(p);
        }
    }
}

void adamw(adamw_job *jobs, size_t count, unsigned threads) {
    run_on_threads((queue){step_adamw, (char *)jobs, sizeof *jobs, count, 0}, threads);
}
