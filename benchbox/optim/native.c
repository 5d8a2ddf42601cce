/* Functions for which torch has no kernel: each reads its arrays once, where torch would need three passes and a copy.
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

/* Return the sum of squares of an even number of bfloat16 values, two per element of `pairs`. Squares are exact in float32. Each
 * row of 256 values is added up in float32 by at least 16 accumulators: each of them rounds at most 16 times, by at most 2^-24 of
 * the row's sum, so the relative error is below 1e-6. The sums of the rows are added in double. */
double sum_of_squares(const uint32_t *restrict pairs, size_t count) {
    double total = 0.0;
    for (size_t row = 0; row < count; row += 128) {
        size_t end = row + 128 < count ? row + 128 : count;
        float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(+ : low, high)
        for (size_t i = row; i < end; i++) {
            float low_value = from_bits(pairs[i] << 16), high_value = from_bits(pairs[i] & 0xffff0000u);
            low += low_value * low_value;
            high += high_value * high_value;
        }
        total += (double)low + (double)high;
    }
    return total;
}

/* One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101): upcast a bfloat16 gradient and divide it by the divisor of the
 * clip, step the float32 master and its moments, round the master into the bfloat16 live weight.
 *
 * decay = 1 - lr * weight_decay; one_minus_beta1 = 1 - beta1; one_minus_beta2 = 1 - beta2; step_size = lr / (1 - beta1^step);
 * bias_correction2_sqrt = sqrt(1 - beta2^step). */
void adamw(float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq, const uint16_t *restrict gradient,
           uint16_t *restrict live, size_t count, float divisor, float decay, float one_minus_beta1, float beta2,
           float one_minus_beta2, float bias_correction2_sqrt, float epsilon, float step_size) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float g = upcast(gradient[i]) / divisor;
        float m = fmaf(one_minus_beta1, g - exp_avg[i], exp_avg[i]);
        float v = fmaf(one_minus_beta2 * g, g, exp_avg_sq[i] * beta2);
        float p = master[i] * decay - step_size * m / (sqrtf(v) / bias_correction2_sqrt + epsilon);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = p;
        live[i] = round_to_bfloat16(p);
    }
}
