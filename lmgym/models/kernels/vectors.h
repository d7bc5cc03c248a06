// Vectors of 16 floats, and bf16 numbers in memory: what the kernels of this folder are written in.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct bf16 { uint16_t bits; };

namespace {

constexpr int LANES = 16;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

inline floats widened(halves bits) { return (floats)(__builtin_convertvector(bits, words) << 16); }
inline floats all(float x) { return x - floats{}; }
inline floats larger(floats x, floats y) { return x > y ? x : y; }

inline floats load(const float* from) {
    floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline floats load(const bf16* from) {
    halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return widened(bits);
}

template <typename T> inline floats load_part(const T* from, int64_t count, float rest) {  // `rest` from `count` on
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::memcpy(some, from, count * sizeof(T));
    floats x = load(some);
    for (int64_t lane = count; lane < LANES; lane++) x[lane] = rest;
    return x;
}

#ifdef __AVX512BF16__
inline halves narrowed(floats x) { return (halves)_mm512_cvtneps_pbh((__m512)x); }  // the nearest bf16, ties to even
#else
inline halves narrowed(floats x) {
    const words bits = (words)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((words)((ints)(x != x) ? words{} + 0x7fc0 : up), halves);
}
#endif

inline floats rounded(floats x) { return widened(narrowed(x)); }

inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, floats x) {
    const halves bits = narrowed(x);
    std::memcpy(to, &bits, sizeof bits);
}

inline float sum(floats x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

inline float largest(floats x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = std::max(most, (float)x[lane]);
    return most;
}

// The sums of 16 vectors as one vector: halves are added four times.
inline floats sums(floats x[LANES]) {
    const ints by8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const ints by4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ints by2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const ints by1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    auto add = [&](int i, const ints& first, int apart) {
        const floats one = x[2 * i], other = x[2 * i + 1];
        x[i] = __builtin_shuffle(one, other, first) + __builtin_shuffle(one, other, first + apart);
    };
    for (int i = 0; i < 8; i++) add(i, by8, 8);
    for (int i = 0; i < 4; i++) add(i, by4, 4);
    for (int i = 0; i < 2; i++) add(i, by2, 2);
    add(0, by1, 1);
    return x[0];
}

// To 2 units in the last place (the polynomial of Cephes); 0 below -87.
inline floats exponential(floats x) {
    const ints tiny = x < -87.0f;
    x = larger(x, all(-87.0f));
    x = x > 88.0f ? all(88.0f) : x;
    const float MAGIC = 12582912.0f;  // added and taken away again, it rounds to a whole number
    const floats whole = (x * 1.44269504f + MAGIC) - MAGIC;
    const floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    y = (floats)((ints)y + (__builtin_convertvector(whole, ints) << 23));
    return tiny ? floats{} : y;
}

inline floats sigmoid(floats x) { return 1.0f / (1.0f + exponential(-x)); }

// GELU's approximation, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv 1606.08415), is
// x * sigmoid(2 u): this is 2 u, and how much it changes with x.
inline floats gelu_inner(floats x) { return 1.5957691216f * (x + 0.044715f * x * x * x); }
inline floats gelu_slope(floats x) { return 1.5957691216f * (1.0f + 0.134145f * x * x); }

}  // namespace
