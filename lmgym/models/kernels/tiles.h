// Matrix products of bf16 numbers with sums in fp32, in tiles of 16 rows by 32 inputs by 16 columns: by AMX where the
// processor has it, else by vectors. Each number of a product is one sum over the inputs in their order, so its bits
// depend neither on the other rows and columns nor on the number of threads.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t TILE = 512, SIDE = 32;  // numbers of a tile; rows and columns of a block, and inputs of a tile

// The left factor [rows, inputs]: numbers from one tile of 16 rows to the next, from 32 inputs to the next, and from
// row to row. Rows and inputs are filled up to multiples of 32.
struct Left {
    const bf16* at;
    int64_t tile, depth, stride;
    Left from(int64_t row, int64_t input) const {  // multiples of 16 and 32
        return {at + row / 16 * tile + input / SIDE * depth, tile, depth, stride};
    }
};

// The right factor [inputs, columns] as tiles [columns/16][inputs/32][16 pairs of inputs][16 columns][2].
struct Right {
    const bf16* at;
    int64_t tile;  // numbers from one block of 16 columns to the next
    Right from(int64_t input, int64_t column) const {
        return {at + column / 16 * tile + input / SIDE * TILE, tile};
    }
};

inline int64_t filled(int64_t count) { return (count + SIDE - 1) / SIDE * SIDE; }
inline Left in_rows(const bf16* at, int64_t stride) { return {at, 16 * stride, SIDE, stride}; }
inline Left in_tiles(const bf16* at, int64_t inputs) { return {at, inputs * 16, TILE, SIDE}; }
inline Right columns_of(const bf16* at, int64_t inputs) { return {at, inputs * 16}; }

// Memory of a thread, which grows and stays.
struct Arena {
    std::vector<char> memory;
    size_t used = 0;
    void begin(size_t bytes) {
        if (memory.size() < bytes + 64) memory.resize(bytes + 64);
        used = 64 - (size_t)memory.data() % 64;
    }
    template <typename T> T* take(int64_t count) {
        T* found = (T*)(memory.data() + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return found;
    }
};

template <int APART> inline void exchange(words x[LANES]) {
    ints upper, lower;
    for (int lane = 0; lane < LANES; lane++) {
        upper[lane] = lane & APART ? LANES + lane - APART : lane;
        lower[lane] = lane & APART ? LANES + lane : lane + APART;
    }
    for (int i = 0; i < LANES; i++) {
        if (i & APART) continue;
        const words one = x[i], other = x[i + APART];
        x[i] = __builtin_shuffle(one, other, upper);
        x[i + APART] = __builtin_shuffle(one, other, lower);
    }
}

inline void transpose(words x[LANES]) {
    exchange<8>(x);
    exchange<4>(x);
    exchange<2>(x);
    exchange<1>(x);
}

inline words load_words(const bf16* from) {
    words x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void store_words(bf16* to, words x) { std::memcpy(to, &x, sizeof x); }

// Sixteen numbers of a row beside those of the next one; rows from `count` on are zeros.
inline words paired(const bf16* from, int64_t stride, int64_t row, int64_t count) {
    halves one = {}, next = {};
    if (row < count) std::memcpy(&one, from + row * stride, sizeof one);
    if (row + 1 < count) std::memcpy(&next, from + (row + 1) * stride, sizeof next);
    return __builtin_convertvector(one, words) | __builtin_convertvector(next, words) << 16;
}

// A tile of the right factor: 32 rows of `from` (its inputs) by 16 columns.
inline void lay_pairs(const bf16* from, int64_t stride, int64_t count, bf16* to) {
    for (int pair = 0; pair < 16; pair++) store_words(to + pair * SIDE, paired(from, stride, 2 * pair, count));
}

// A tile of the left factor that is `from` transposed: 16 columns of `from` by 32 of its rows.
inline void lay_transposed(const bf16* from, int64_t stride, int64_t count, bf16* to) {
    words x[LANES];
    for (int pair = 0; pair < 16; pair++) x[pair] = paired(from, stride, 2 * pair, count);
    transpose(x);
    for (int row = 0; row < 16; row++) store_words(to + row * SIDE, x[row]);
}

// A tile of the right factor that is `from` transposed: 16 rows of `from` (its columns) by 32 of its columns.
inline void lay_words(const bf16* from, int64_t stride, int64_t count, bf16* to) {
    words x[LANES];
    for (int row = 0; row < 16; row++) x[row] = row < count ? load_words(from + row * stride) : words{};
    transpose(x);
    for (int pair = 0; pair < 16; pair++) store_words(to + pair * SIDE, x[pair]);
}

#ifdef __AMX_BF16__

inline void begin_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
}

inline void end_tiles() { _tile_release(); }

// 32 rows by 32 columns (WIDE) or 16: out = the product, or out += it. `depth` are tiles of 32 inputs.
template <bool WIDE>
inline void block(const Left& a, const Right& b, int64_t depth, float* out, int64_t stride, bool adds) {
    float* below = out + 16 * stride;
    const int64_t bytes = stride * sizeof(float), row = a.stride * sizeof(bf16);
    if (adds) {
        _tile_loadd(0, out, bytes);
        _tile_loadd(2, below, bytes);
        if (WIDE) _tile_loadd(1, out + 16, bytes);
        if (WIDE) _tile_loadd(3, below + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k++) {
        _tile_loadd(4, a.at + k * a.depth, row);
        _tile_loadd(6, b.at + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (WIDE) _tile_loadd(7, b.at + b.tile + k * TILE, 64);
        if (WIDE) _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a.at + a.tile + k * a.depth, row);
        _tile_dpbf16ps(2, 5, 6);
        if (WIDE) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(2, below, bytes);
    if (WIDE) _tile_stored(1, out + 16, bytes);
    if (WIDE) _tile_stored(3, below + 16, bytes);
}

#else

inline void begin_tiles() {}
inline void end_tiles() {}

inline floats multiplied(floats sum, uint32_t pair, words pairs) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
#else
    const words both = pair - words{}, high = words{} + 0xffff0000u;
    return sum + (floats)(both << 16) * (floats)(pairs << 16) + (floats)(both & high) * (floats)(pairs & high);
#endif
}

template <bool WIDE>
inline void block(const Left& a, const Right& b, int64_t depth, float* out, int64_t stride, bool adds) {
    constexpr int ROWS = 8;
    for (int side = 0; side < (WIDE ? 2 : 1); side++)
        for (int row = 0; row < SIDE; row += ROWS) {
            float* place = out + row * stride + side * LANES;
            const bf16* own = a.at + row / 16 * a.tile + row % 16 * a.stride;
            floats sums[ROWS];
            for (int r = 0; r < ROWS; r++) sums[r] = adds ? load(place + r * stride) : floats{};
            for (int64_t k = 0; k < depth; k++)
                for (int pair = 0; pair < 16; pair++) {
                    const words right = load_words(b.at + side * b.tile + k * TILE + pair * SIDE);
                    for (int r = 0; r < ROWS; r++) {
                        uint32_t left;
                        std::memcpy(&left, own + r * a.stride + k * a.depth + 2 * pair, sizeof left);
                        sums[r] = multiplied(sums[r], left, right);
                    }
                }
            for (int r = 0; r < ROWS; r++) store(place + r * stride, sums[r]);
        }
}

#endif

// A product by the thread that calls: rows a multiple of 32, columns one of 16.
inline void multiply_here(const Left& a, const Right& b, int64_t rows, int64_t columns, int64_t inputs, float* out,
                          int64_t stride, bool adds) {
    for (int64_t column = 0; column < columns; column += SIDE)
        for (int64_t row = 0; row < rows; row += SIDE) {
            auto compute = columns - column >= SIDE ? block<true> : block<false>;
            float* place = out + row * stride + column;
            compute(a.from(row, 0), b.from(0, column), inputs / SIDE, place, stride, adds);
        }
}

constexpr int64_t ROWS_AT_ONCE = 256, COLUMNS_AT_ONCE = 256, INPUTS_AT_ONCE = 1024;  // whose numbers stay near

// 32 rows that will be written soon: while tiles are multiplied, they come into the cache.
template <typename Number> inline void announce(const Number* out, int64_t stride) {
    for (int64_t row = 0; row < SIDE; row++)
        for (size_t i = 0; i < SIDE * sizeof(Number); i += 64)
            __builtin_prefetch((const char*)(out + row * stride) + i, 1);
}

// A product by all threads, in blocks that `finish(row, column, sums[32][32])` takes, after `prepare(row, column)`; a
// second one of `rank` inputs is added to it. Rows and columns are multiples of 32.
template <typename Prepare, typename Finish>
void multiply_all(const Left& a, const Right& b, int64_t rows, int64_t columns, int64_t inputs, const Prepare& prepare,
                  const Finish& finish, const Left& low = {}, const Right& up = {}, int64_t rank = 0) {
    const int64_t groups = (columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
    const int64_t chunks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel
    {
        begin_tiles();
        alignas(64) float sums[SIDE * SIDE];
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < chunks * groups; work++) {
            const int64_t row = work / groups * ROWS_AT_ONCE, column = work % groups * COLUMNS_AT_ONCE;
            const int64_t last_row = std::min(rows, row + ROWS_AT_ONCE);
            const int64_t last_column = std::min(columns, column + COLUMNS_AT_ONCE);
            for (int64_t r = row; r < last_row; r += SIDE)
                for (int64_t c = column; c < last_column; c += SIDE) {
                    prepare(r, c);
                    block<true>(a.from(r, 0), b.from(0, c), inputs / SIDE, sums, SIDE, false);
                    if (rank) block<true>(low.from(r, 0), up.from(0, c), rank / SIDE, sums, SIDE, true);
                    finish(r, c, sums);
                }
        }
        end_tiles();
    }
}

// out [rows columns] = the product, or out += it, by all threads; a long sum goes on where it stopped.
inline void multiply_into(const Left& a, const Right& b, int64_t rows, int64_t columns, int64_t inputs, float* out,
                          int64_t stride, bool adds) {
    const int64_t groups = (columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
    const int64_t chunks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < chunks * groups; work++) {
            const int64_t row = work / groups * ROWS_AT_ONCE, column = work % groups * COLUMNS_AT_ONCE;
            const int64_t last_row = std::min(rows, row + ROWS_AT_ONCE);
            const int64_t last_column = std::min(columns, column + COLUMNS_AT_ONCE);
            for (int64_t k = 0; k < inputs; k += INPUTS_AT_ONCE) {
                const int64_t depth = std::min(INPUTS_AT_ONCE, inputs - k) / SIDE;
                for (int64_t r = row; r < last_row; r += SIDE)
                    for (int64_t c = column; c < last_column; c += SIDE) {
                        float* place = out + r * stride + c;
                        announce(place, stride);
                        block<true>(a.from(r, k), b.from(k, c), depth, place, stride, adds || k > 0);
                    }
            }
        }
        end_tiles();
    }
}

}  // namespace

// Weights [rows columns] as the right factor of a product whose inputs are their columns.
extern "C" void lay_out_transposed(const bf16* weights, bf16* to, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t k = 0; k < columns; k += SIDE)
            lay_words(weights + row * columns + k, columns, 16, to + row * columns + k * 16);
}
