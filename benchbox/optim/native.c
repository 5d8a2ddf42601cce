/* Passes over arrays that torch has no kernel for: each reads its arrays once, where torch would take three passes and a copy.
 *
 * Built by native.py with -ffp-contract=off, so that only what says so is fused. That, and the order of operations, makes `adamw`
 * give the bits of torch's fused AdamW kernel on whole vectors, which one_pass.py makes sure of before it is used.
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

/* To the nearest bfloat16, ties to even; every NaN becomes the one that torch's vector kernels make. */
static inline uint16_t round_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t nearest = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return value != value ? 0xffffu : nearest;
}

/* Sum of squares of an even number of bfloat16 values. Squares are exact in float32. Rows of 256 are added in float32, by at
 * least 16 accumulators: each rounds at most 16 times, by 2^-24 of a row, which is below 1e-6. Rows are added in double. */
double sum_of_squares(const uint32_t *restrict pairs, size_t count) {
    double total = 0.0;
    for (size_t row = 0; row < count; row += 128) {
        size_t end = row + 128 < count ? row + 128 : count;
        float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(+ : low, high)
        for (size_t i = row; i < end; i++) {
            float first = from_bits(pairs[i] << 16), second = from_bits(pairs[i] & 0xffff0000u);
            low += first * first;
            high += second * second;
        }
        total += (double)low + (double)high;
    }
    return total;
}

/* One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101): upcast a bfloat16 gradient and divide it by the clip's divisor,
 * step the float32 master and its moments, round the master into the bfloat16 live weight. */
void adamw(float *restrict master, float *restrict first, float *restrict second, const uint16_t *restrict gradient,
           uint16_t *restrict live, size_t count, float divisor, float decay, float first_share, float second_kept,
           float second_share, float correction, float epsilon, float rate) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float g = upcast(gradient[i]) / divisor;
        float m = fmaf(first_share, g - first[i], first[i]);
        float v = fmaf(second_share * g, g, second[i] * second_kept);
        float p = master[i] * decay - rate * m / (sqrtf(v) / correction + epsilon);
        first[i] = m;
        second[i] = v;
        master[i] = p;
        live[i] = round_to_bfloat16(p);
    }
}
