// What scoring and training of layers like Llama's and Gemma's compute in bf16 on a CPU, forward and backward: norms,
// positions, attention over packed rows, gated products, matrix products, and the LM head's softmax. Called through
// ctypes (training.py); it knows neither torch nor Python.
//
// Results are rounded where transformers' own modules round them under autocast. A token's numbers depend neither on
// the other rows of a pass nor on the number of threads; gradients of weights are sums over all tokens in their order.
// Rows of bf16 matrices are filled up to multiples of 32 with anything; only `rows` of them count.

#include <omp.h>

#include "tiles.h"

namespace {

constexpr int64_t ROWS_OF_PART = 64;  // whose gradients of a norm's weights are added up first
constexpr int64_t MOST_SIZE = 256;    // of heads

inline float dot(const float* one, const float* other, int64_t size) {
    floats total = {};
    for (int64_t i = 0; i < size; i += LANES) total += load(one + i) * load(other + i);
    return sum(total);
}

// Positions of a head: x * cosine + (x turned by a quarter) * sine. Buffers have 16 numbers more than the head.
inline void turn(const float* x, const float* cosines, const float* sines, int64_t size, float* out) {
    float other[MOST_SIZE + LANES];
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) store(other + i, -load(x + half + i));
    for (int64_t i = 0; i < half; i += LANES) store(other + half + i, load(x + i));
    for (int64_t i = 0; i < size; i += LANES)
        store(out + i, load(x + i) * load(cosines + i) + load(other + i) * load(sines + i));
}

// Its transposed map, for gradients.
inline void turn_back(const float* x, const float* cosines, const float* sines, int64_t size, float* out) {
    float scaled[MOST_SIZE + LANES] = {}, other[MOST_SIZE + LANES];
    const int64_t half = size / 2;
    for (int64_t i = 0; i < size; i += LANES) store(scaled + i, load(x + i) * load(sines + i));
    for (int64_t i = 0; i < half; i += LANES) store(other + i, load(scaled + half + i));
    for (int64_t i = 0; i < half; i += LANES) store(other + half + i, -load(scaled + i));
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * load(cosines + i) + load(other + i));
}

}  // namespace

extern "C" {

int products() {  // 1 if there are products in tiles, which the system must permit a process to use
#ifdef __AMX_BF16__
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM of the tiles' data
#else
    return 0;
#endif
}

void use_threads(int64_t count) { omp_set_num_threads(count); }  // of the thread that calls

// RMS norms of rows [rows size] in fp32, in bf16, and the factors [rows] that they were multiplied by.
void norm(const float* hidden, const float* weight, bf16* out, float* factors, int64_t rows, int64_t size,
          float epsilon) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        const float* own = hidden + row * size;
        const float factor = factors[row] = 1.0f / std::sqrt(dot(own, own, size) / size + epsilon);
        for (int64_t i = 0; i < size; i += LANES)
            store(out + row * size + i, load(weight + i) * (load(own + i) * factor));
    }
}

// by_hidden = what reaches the hidden states past the norm (`past`) plus what reaches them through it; the same in bf16
// if `narrow` is given; the norm's output again; and the gradient of its weights from each 64 rows [rows/64 size].
void norm_backward(const bf16* by_out, const float* hidden, const float* factors, const float* weight,
                   const float* past, float* by_hidden, bf16* narrow, bf16* out, float* by_weight, int64_t rows,
                   int64_t size) {
    const int64_t parts = (rows + ROWS_OF_PART - 1) / ROWS_OF_PART;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        float* own_weight = by_weight + part * size;
        std::fill(own_weight, own_weight + size, 0.0f);
        for (int64_t row = part * ROWS_OF_PART; row < std::min(rows, (part + 1) * ROWS_OF_PART); row++) {
            const int64_t start = row * size;
            const float factor = factors[row];
            floats total = {};
            for (int64_t i = 0; i < size; i += LANES) {
                const floats normed = load(hidden + start + i) * factor, gradient = load(by_out + start + i);
                total += normed * gradient * load(weight + i);
                store(own_weight + i, load(own_weight + i) + normed * gradient);
            }
            const float mean = sum(total) / size;
            for (int64_t i = 0; i < size; i += LANES) {
                const floats normed = load(hidden + start + i) * factor, scale = load(weight + i);
                const floats through = (load(by_out + start + i) * scale - normed * mean) * factor;
                const floats both = load(past + start + i) + through;
                store(by_hidden + start + i, both);
                if (narrow) store(narrow + start + i, both);
                store(out + start + i, scale * normed);
            }
        }
    }
}

// [rows 2*size] -> [rows size]
void gated(const bf16* gate_up, bf16* out, int64_t rows, int64_t size, int gelu) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const floats gate = load(gate_up + row * 2 * size + i), up = load(gate_up + (row * 2 + 1) * size + i);
            store(out + row * size + i, rounded(gate * sigmoid(gelu ? gelu_inner(gate) : gate)) * up);
        }
}

// The gradient by gate and up, and the output again.
void gated_backward(const bf16* by_out, const bf16* gate_up, bf16* by_gate_up, bf16* out, int64_t rows, int64_t size,
                    int gelu) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t first = row * 2 * size + i, second = first + size;
            const floats gate = load(gate_up + first), up = load(gate_up + second);
            const floats gradient = load(by_out + row * size + i);
            const floats share = sigmoid(gelu ? gelu_inner(gate) : gate), open = rounded(gate * share);
            const floats slope = gelu ? gelu_slope(gate) : all(1.0f);
            store(by_gate_up + first, gradient * up * share * (1.0f + gate * slope * (1.0f - share)));
            store(by_gate_up + second, gradient * open);
            store(out + row * size + i, open * up);
        }
}

// Queries and keys of each token, the first `heads` heads of rows that are `stride` long, with their positions and the
// norms that they may have (the first `queries` heads one, the others another): [rows heads size]. Norms round before
// their weights, or if `after`, behind them (Gemma).
void positions(const bf16* from, int64_t stride, const float* cosines, const float* sines, const float* query_norm,
               const float* key_norm, bf16* out, int64_t rows, int64_t queries, int64_t heads, int64_t size,
               float epsilon, int after) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const float* weight = head < queries ? query_norm : key_norm;
            float x[MOST_SIZE + LANES] = {}, turned[MOST_SIZE];
            for (int64_t i = 0; i < size; i += LANES) store(x + i, load(from + row * stride + head * size + i));
            if (weight) {
                const float factor = 1.0f / std::sqrt(dot(x, x, size) / size + epsilon);
                for (int64_t i = 0; i < size; i += LANES) {
                    const floats normed = load(x + i) * factor, scale = load(weight + i);
                    store(x + i, after ? rounded(normed * scale) : rounded(normed) * scale);
                }
            }
            turn(x, cosines + row * size, sines + row * size, size, turned);
            for (int64_t i = 0; i < size; i += LANES) store(out + (row * heads + head) * size + i, load(turned + i));
        }
}

// The gradient by positioned queries and keys, in rows of `stride`, becomes the gradient by what they were before. The
// gradients of the norms' weights come from each 64 rows [rows/64 2 size].
void positions_backward(bf16* gradient, const bf16* from, int64_t stride, const float* cosines, const float* sines,
                        const float* query_norm, const float* key_norm, float* by_norms, int64_t rows, int64_t queries,
                        int64_t heads, int64_t size, float epsilon, int after) {
    const int64_t parts = (rows + ROWS_OF_PART - 1) / ROWS_OF_PART;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        if (query_norm) std::fill(by_norms + part * 2 * size, by_norms + (part + 1) * 2 * size, 0.0f);
        for (int64_t row = part * ROWS_OF_PART; row < std::min(rows, (part + 1) * ROWS_OF_PART); row++)
            for (int64_t head = 0; head < heads; head++) {
                bf16* place = gradient + row * stride + head * size;
                float x[MOST_SIZE + LANES] = {}, turned[MOST_SIZE];
                for (int64_t i = 0; i < size; i += LANES) store(x + i, load(place + i));
                turn_back(x, cosines + row * size, sines + row * size, size, turned);
                if (query_norm) {
                    const float* weight = head < queries ? query_norm : key_norm;
                    float* by_weight = by_norms + (part * 2 + (head >= queries)) * size;
                    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(from + row * stride + head * size + i));
                    const float factor = 1.0f / std::sqrt(dot(x, x, size) / size + epsilon);
                    floats total = {};
                    for (int64_t i = 0; i < size; i += LANES) {
                        const floats normed = load(x + i) * factor, by_normed = load(turned + i);
                        store(by_weight + i, load(by_weight + i) + by_normed * (after ? normed : rounded(normed)));
                        total += normed * by_normed * load(weight + i);
                    }
                    const float mean = sum(total) / size;
                    for (int64_t i = 0; i < size; i += LANES)
                        store(turned + i, (load(turned + i) * load(weight + i) - load(x + i) * factor * mean) * factor);
                }
                for (int64_t i = 0; i < size; i += LANES) store(place + i, load(turned + i));
            }
    }
}

void narrow(const float* from, bf16* to, int64_t count) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i));
}

// bf16 numbers, each rounded up or down by the random integer of its place (models/rounding.py): `chunk` numbers take
// their integers from a window of the table, which begins at their place in `windows`.
void round_randomly(const int32_t* bits, const int16_t* table, const int64_t* windows, bf16* to, int64_t count,
                    int64_t chunk) {
#pragma omp parallel for
    for (int64_t start = 0; start < count; start += chunk) {
        const int16_t* random = table + windows[start / chunk];
        for (int64_t i = start; i < std::min(count, start + chunk); i++)
            to[i].bits = (uint32_t)(bits[i] + random[i - start] + (1 << 15)) >> 16;
    }
}

// Weights [rows columns] as the right factor of a product whose inputs are their rows, from `first` on of `inputs`. (For
// one whose inputs are their columns: `lay_out_transposed` of tiles.h.)
void lay_out(const bf16* weights, bf16* to, int64_t rows, int64_t columns, int64_t first, int64_t inputs) {
#pragma omp parallel for
    for (int64_t column = 0; column < columns; column += 16)
        for (int64_t k = 0; k < rows; k += SIDE)
            lay_pairs(weights + k * columns + column, columns, SIDE, to + column * inputs + (first + k) * 16);
}

// [rows inputs] times weights that are laid out, plus `low` [rows rank] times `up`, plus the bias: [rows outputs] in
// bf16; or, rounded to it, added to `residual`, in fp32.
void product(const bf16* hidden, const bf16* weights, const bf16* bias, const float* residual, void* out,
             const bf16* low, const bf16* up, int64_t rows, int64_t inputs, int64_t outputs, int64_t rank) {
    const Left a = in_rows(hidden, inputs);
    const Right b = columns_of(weights, inputs);
    const auto multiply = [&](auto* to, auto result) {
        multiply_all(a, b, filled(rows), outputs, inputs,
                     [=](int64_t row, int64_t column) { announce(to + row * outputs + column, outputs); },
                     [=](int64_t row, int64_t column, const float* sums) {
            const int64_t count = std::min(SIDE, rows - row);
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < SIDE; i += LANES) {
                    const int64_t place = (row + r) * outputs + column + i;
                    store(to + place, result(load(sums + r * SIDE + i), column + i, place));
                }
        }, in_rows(low, rank), columns_of(up, rank), rank);
    };
    const auto plain = [](floats x, int64_t, int64_t) { return x; };
    const auto biased = [=](floats x, int64_t column, int64_t) { return x + load(bias + column); };
    if (residual) {
        const auto added = [=](floats x, int64_t column, int64_t place) {
            return load(residual + place) + rounded(bias ? x + load(bias + column) : x);
        };
        multiply((float*)out, added);
    } else if (bias) {
        multiply((bf16*)out, biased);
    } else {
        multiply((bf16*)out, plain);
    }
}

// by_out [rows outputs], transposed, times hidden [rows inputs]: [outputs inputs]. `left` and `right` have room for both
// factors, rows filled up.
void weight_gradient(const bf16* by_out, const bf16* hidden, bf16* left, bf16* right, float* out, int64_t rows,
                     int64_t outputs, int64_t inputs) {
    const int64_t whole = filled(rows);
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int64_t k = 0; k < rows; k += SIDE)
            for (int64_t column = 0; column < outputs; column += 16)
                lay_transposed(by_out + k * outputs + column, outputs, rows - k, left + column * whole + k * 16);
#pragma omp for schedule(static)
        for (int64_t k = 0; k < rows; k += SIDE)
            for (int64_t column = 0; column < inputs; column += 16)
                lay_pairs(hidden + k * inputs + column, inputs, rows - k, right + column * whole + k * 16);
    }
    multiply_into(in_tiles(left, whole), columns_of(right, whole), outputs, inputs, whole, out, inputs, false);
}

}  // extern "C"

#include "training_attention.h"
#include "training_head.h"
