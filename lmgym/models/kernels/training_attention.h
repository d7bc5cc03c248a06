// Attention over packed rows in bf16, forward and backward. A segment is a run of tokens that attends causally to
// itself, and to all tokens of the spans before it (its prompt, say).

#pragma once

#include "tiles.h"

// Strides count numbers, not bytes.
struct PackedAttention {
    const bf16* query_key;  // [R H+K D], with positions
    const bf16* value;      // [R K D], rows `stride` apart
    bf16* out;              // [R H D]
    float* normaliser;      // [R H], logarithms
    const bf16* by_out;     // [R H D]
    bf16* by_joined;        // [R H+2K D]
    const int64_t* starts;  // [S+1] the first span of each segment; the last of its spans is its own tokens
    const int64_t* spans;   // first token, and number of tokens
    int64_t stride, segments, rows, heads, key_heads, size;
    float scale;
};

namespace {

constexpr int64_t TOKENS_OF_UNIT = 256, ROWS_OF_BLOCK = 128;

// Some of a segment's tokens, [begin, end) of them, which one thread computes for one key head; `before` are the tokens
// in earlier spans. `place` is where the gradients of the keys that it reads begin.
struct Unit {
    int64_t segment, begin, end, before, first, place;
    int64_t width() const { return before + end; }
};

inline std::vector<Unit> units_of(const PackedAttention& a) {
    std::vector<Unit> units;
    int64_t place = 0;
    for (int64_t s = 0; s < a.segments; s++) {
        int64_t before = 0;
        const int64_t own = a.starts[s + 1] - 1;
        for (int64_t span = a.starts[s]; span < own; span++) before += a.spans[2 * span + 1];
        for (int64_t begin = 0; begin < a.spans[2 * own + 1]; begin += TOKENS_OF_UNIT) {
            const int64_t end = std::min(begin + TOKENS_OF_UNIT, a.spans[2 * own + 1]);
            units.push_back({s, begin, end, before, a.spans[2 * own], place});
            place += filled(before + end);
        }
    }
    return units;
}

// The keys or values that a unit reads, as rows of `deep` numbers, zeros behind them.
inline void gather(const PackedAttention& a, const Unit& unit, const bf16* from, int64_t stride, int64_t deep,
                   bf16* to) {
    std::memset(to, 0, filled(unit.width()) * deep * sizeof(bf16));
    const int64_t own = a.starts[unit.segment + 1] - 1;
    for (int64_t span = a.starts[unit.segment]; span <= own; span++) {
        const int64_t first = a.spans[2 * span], count = span < own ? a.spans[2 * span + 1] : unit.end;
        for (int64_t t = 0; t < count; t++, to += deep)
            std::memcpy(to, from + (first + t) * stride, a.size * sizeof(bf16));
    }
}

// Rows [first, first + count) of a unit, a token's queries side by side: zeros behind them up to `whole`.
inline void gather_rows(const PackedAttention& a, const Unit& unit, const bf16* from, int64_t stride, int64_t first,
                        int64_t count, int64_t whole, int64_t deep, bf16* to) {
    const int64_t group = a.heads / a.key_heads;
    std::memset(to, 0, whole * deep * sizeof(bf16));
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = first + r, token = unit.first + unit.begin + row / group;
        std::memcpy(to + r * deep, from + token * stride + row % group * a.size, a.size * sizeof(bf16));
    }
}

// Tiles of the right factor. Of rows that are its columns:
inline void lay_rows(const bf16* from, int64_t rows, int64_t deep, bf16* to) {
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t k = 0; k < deep; k += SIDE) lay_words(from + row * deep + k, deep, 16, to + row * deep + k * 16);
}

// Of rows that are its inputs, `columns` of them, which are `stride` apart:
inline void lay_inputs(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* to) {
    for (int64_t column = 0; column < columns; column += 16)
        for (int64_t k = 0; k < rows; k += SIDE)
            lay_pairs(from + k * stride + column, stride, SIDE, to + column * rows + k * 16);
}

inline void attend_unit(const PackedAttention& a, const Unit& unit, int64_t head, Arena& arena) {
    const int64_t size = a.size, deep = filled(size), width = filled(unit.width()), group = a.heads / a.key_heads;
    const int64_t rows = (unit.end - unit.begin) * group;
    arena.begin(4 * width * deep * sizeof(bf16) + SIDE * (deep + width) * (sizeof(bf16) + sizeof(float)) + 4096);
    // 1. Keys and values as right factors.
    bf16* gathered = arena.take<bf16>(width * deep);
    bf16 *keys = arena.take<bf16>(width * deep), *values = arena.take<bf16>(width * deep);
    gather(a, unit, a.query_key + (a.heads + head) * size, (a.heads + a.key_heads) * size, deep, gathered);
    lay_rows(gathered, width, deep, keys);
    gather(a, unit, a.value + head * size, a.stride, deep, gathered);
    lay_inputs(gathered, deep, width, size, values);
    // 2. Thirty-two rows at a time.
    bf16 *query = arena.take<bf16>(SIDE * deep), *shares = arena.take<bf16>(SIDE * width);
    float *scores = arena.take<float>(SIDE * width), *total = arena.take<float>(SIDE * deep);
    for (int64_t first = 0; first < rows; first += SIDE) {
        const int64_t count = std::min(SIDE, rows - first);
        const int64_t seen = filled(unit.before + unit.begin + (first + count - 1) / group + 1);
        gather_rows(a, unit, a.query_key + head * group * size, (a.heads + a.key_heads) * size, first, count, SIDE,
                    deep, query);
        multiply_here(in_rows(query, deep), columns_of(keys, deep), SIDE, seen, deep, scores, width, false);
        float mass[SIDE];
        for (int64_t r = 0; r < SIDE; r++) {
            if (r >= count) {
                std::memset(shares + r * width, 0, seen * sizeof(bf16));
                continue;
            }
            float* own = scores + r * width;
            const int64_t visible = unit.before + unit.begin + (first + r) / group + 1;
            floats most = all(NOTHING), sums = {};
            for (int64_t w = 0; w < visible; w += LANES) {
                const floats x = load_part(own + w, visible - w, NOTHING) * a.scale;
                store(own + w, x);
                most = larger(most, x);
            }
            const float highest = largest(most);
            int64_t w = 0;
            for (; w < visible; w += LANES) {
                const floats share = exponential(load(own + w) - highest);
                sums += share;
                store(shares + r * width + w, share);
            }
            for (; w < seen; w += LANES) store(shares + r * width + w, floats{});
            mass[r] = sum(sums);
            const int64_t row = first + r, token = unit.first + unit.begin + row / group;
            a.normaliser[token * a.heads + head * group + row % group] = highest + std::log(mass[r]);
        }
        multiply_here(in_rows(shares, width), columns_of(values, width), SIDE, size, seen, total, deep, false);
        for (int64_t r = 0; r < count; r++) {
            const int64_t row = first + r, token = unit.first + unit.begin + row / group;
            bf16* out = a.out + (token * a.heads + head * group + row % group) * size;
            for (int64_t i = 0; i < size; i += LANES) store(out + i, load(total + r * deep + i) / mass[r]);
        }
    }
}

// The gradients of a unit's queries, and its part of the gradients of the keys and values that it reads: [width D] each.
inline void attend_unit_backward(const PackedAttention& a, const Unit& unit, int64_t head, float* by_keys,
                                 float* by_values, Arena& arena) {
    const int64_t size = a.size, deep = filled(size), width = filled(unit.width()), group = a.heads / a.key_heads;
    const int64_t rows = (unit.end - unit.begin) * group, both = a.heads + a.key_heads, MOST = ROWS_OF_BLOCK;
    arena.begin((3 * width * deep + 6 * MOST * deep + 4 * width * MOST) * sizeof(bf16) +
                (2 * SIDE * MOST + MOST * deep) * sizeof(float) + 4096);
    bf16 *keys = arena.take<bf16>(width * deep), *values = arena.take<bf16>(width * deep);
    bf16 *key_inputs = arena.take<bf16>(width * deep);
    gather(a, unit, a.query_key + (a.heads + head) * size, both * size, deep, keys);
    gather(a, unit, a.value + head * size, a.stride, deep, values);
    lay_inputs(keys, deep, width, size, key_inputs);
    std::fill(by_keys, by_keys + width * size, 0.0f);
    std::fill(by_values, by_values + width * size, 0.0f);
    bf16 *query = arena.take<bf16>(MOST * deep), *by_out = arena.take<bf16>(MOST * deep);
    bf16 *query_columns = arena.take<bf16>(MOST * deep), *out_columns = arena.take<bf16>(MOST * deep);
    bf16 *query_inputs = arena.take<bf16>(MOST * deep), *out_inputs = arena.take<bf16>(MOST * deep);
    bf16 *shares = arena.take<bf16>(width * MOST), *by_scores = arena.take<bf16>(width * MOST);
    bf16* turned = arena.take<bf16>(width * MOST);
    float *scores = arena.take<float>(SIDE * MOST), *by_shares = arena.take<float>(SIDE * MOST);
    float* total = arena.take<float>(MOST * deep);
    for (int64_t first = 0; first < rows; first += MOST) {
        const int64_t count = std::min(MOST, rows - first), whole = filled(count);
        const int64_t seen = filled(unit.before + unit.begin + (first + count - 1) / group + 1);
        // 1. Queries and gradients of outputs, in the forms that products need; what each row sees, its normaliser, and
        // the sum of its gradient times its output.
        gather_rows(a, unit, a.query_key + head * group * size, both * size, first, count, whole, deep, query);
        gather_rows(a, unit, a.by_out + head * group * size, a.heads * size, first, count, whole, deep, by_out);
        lay_rows(query, whole, deep, query_columns);
        lay_rows(by_out, whole, deep, out_columns);
        lay_inputs(query, deep, whole, size, query_inputs);
        lay_inputs(by_out, deep, whole, size, out_inputs);
        alignas(64) int32_t visible[MOST];
        alignas(64) float normaliser[MOST], common[MOST];
        for (int64_t r = 0; r < whole; r++) {
            visible[r] = 0, normaliser[r] = common[r] = 0.0f;
            if (r >= count) continue;
            const int64_t row = first + r, token = unit.first + unit.begin + row / group;
            const int64_t place = token * a.heads + head * group + row % group;
            visible[r] = unit.before + unit.begin + row / group + 1;
            normaliser[r] = a.normaliser[place];
            floats product = {};
            for (int64_t i = 0; i < size; i += LANES)
                product += load(by_out + r * deep + i) * load(a.out + place * size + i);
            common[r] = sum(product);
        }
        // 2. Shares and gradients of scores, a row for each key.
        for (int64_t key = 0; key < seen; key += SIDE) {
            multiply_here(in_rows(keys + key * deep, deep), columns_of(query_columns, deep), SIDE, whole, deep, scores,
                          MOST, false);
            multiply_here(in_rows(values + key * deep, deep), columns_of(out_columns, deep), SIDE, whole, deep,
                          by_shares, MOST, false);
            for (int64_t k = 0; k < SIDE; k++)
                for (int64_t r = 0; r < whole; r += LANES) {
                    ints limit;
                    std::memcpy(&limit, visible + r, sizeof limit);
                    floats share = exponential(load(scores + k * MOST + r) * a.scale - load(normaliser + r));
                    share = limit > (int32_t)(key + k) ? share : floats{};
                    const floats by_score = share * (load(by_shares + k * MOST + r) - load(common + r)) * a.scale;
                    store(shares + (key + k) * MOST + r, share);
                    store(by_scores + (key + k) * MOST + r, by_score);
                }
        }
        // 3. Gradients of keys, values and queries.
        multiply_here(in_rows(by_scores, MOST), columns_of(query_inputs, whole), seen, size, whole, by_keys, size,
                      true);
        multiply_here(in_rows(shares, MOST), columns_of(out_inputs, whole), seen, size, whole, by_values, size, true);
        for (int64_t r = 0; r < whole; r += 16)
            for (int64_t key = 0; key < seen; key += SIDE)
                lay_transposed(by_scores + key * MOST + r, MOST, SIDE, turned + r * seen + key * 16);
        multiply_here(in_tiles(turned, seen), columns_of(key_inputs, width), whole, size, seen, total, deep, false);
        for (int64_t r = 0; r < count; r++) {
            const int64_t row = first + r, token = unit.first + unit.begin + row / group;
            bf16* to = a.by_joined + (token * (both + a.key_heads) + head * group + row % group) * size;
            for (int64_t i = 0; i < size; i += LANES) store(to + i, load(total + r * deep + i));
        }
    }
}

// The gradients of a key head's keys and values: the sums of what all units say, in their order.
inline void add_units(const PackedAttention& a, const std::vector<Unit>& units, int64_t head, const float* by_keys,
                      const float* by_values) {
    constexpr int64_t TOKENS = 64;
    const int64_t size = a.size, joined = a.heads + 2 * a.key_heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < a.rows; first += TOKENS) {
        float keys[TOKENS * MOST_SIZE] = {}, values[TOKENS * MOST_SIZE] = {};
        const int64_t last = std::min(a.rows, first + TOKENS);
        for (const Unit& unit : units) {
            const int64_t own = a.starts[unit.segment + 1] - 1;
            int64_t place = unit.place;
            for (int64_t span = a.starts[unit.segment]; span <= own; span++) {
                const int64_t begin = a.spans[2 * span], count = span < own ? a.spans[2 * span + 1] : unit.end;
                for (int64_t t = std::max(begin, first); t < std::min(begin + count, last); t++)
                    for (int64_t i = 0; i < size; i += LANES) {
                        const int64_t from = (place + t - begin) * size + i, to = (t - first) * size + i;
                        store(keys + to, load(keys + to) + load(by_keys + from));
                        store(values + to, load(values + to) + load(by_values + from));
                    }
                place += count;
            }
        }
        for (int64_t t = first; t < last; t++)
            for (int64_t i = 0; i < size; i += LANES) {
                bf16* to = a.by_joined + (t * joined + a.heads + head) * size + i;
                store(to, load(keys + (t - first) * size + i));
                store(to + a.key_heads * size, load(values + (t - first) * size + i));
            }
    }
}

}  // namespace

extern "C" {

void attend_packed(const PackedAttention* a) {
    const std::vector<Unit> units = units_of(*a);
#pragma omp parallel
    {
        begin_tiles();
        thread_local Arena arena;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < (int64_t)units.size() * a->key_heads; work++)
            attend_unit(*a, units[work / a->key_heads], work % a->key_heads, arena);
        end_tiles();
    }
}

// Numbers of the room that `attend_packed_backward` needs.
int64_t room(const PackedAttention* a) {
    const std::vector<Unit> units = units_of(*a);
    return units.empty() ? 0 : 2 * (units.back().place + filled(units.back().width())) * a->size;
}

void attend_packed_backward(const PackedAttention* a, float* by_keys) {
    const std::vector<Unit> units = units_of(*a);
    float* by_values = by_keys + room(a) / 2;
#pragma omp parallel
    {
        begin_tiles();
        thread_local Arena arena;
        for (int64_t head = 0; head < a->key_heads; head++) {
#pragma omp for schedule(dynamic, 1)
            for (size_t number = 0; number < units.size(); number++) {
                const int64_t place = units[number].place * a->size;
                attend_unit_backward(*a, units[number], head, by_keys + place, by_values + place, arena);
            }
            add_units(*a, units, head, by_keys, by_values);
        }
        end_tiles();
    }
}

}  // extern "C"
