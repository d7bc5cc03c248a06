// What a decoding step of a model like Llama or Gemma computes in bf16 on a CPU: matrix products of few rows, norms,
// attention of one new token per answer, the gated product, and the draw. Called through ctypes (native.py); it knows
// neither torch nor Python.
//
// Numbers lie in memory as bf16 and are computed with as floats, 16 at a time; results are rounded where transformers'
// own modules round them. A row's bits depend neither on other rows nor on the number of threads: one thread computes
// each sum, in an order that only the row's own length decides.

#include "tiles.h"

namespace {

constexpr int BLOCK = 256;        // logits of a block of the draw
constexpr int MOST_QUERIES = 32;  // that read a prompt's keys together

}  // namespace

// One layer's attention of S slots. Strides and capacities count numbers or tokens, not bytes.
struct Attention {
    const bf16 *query, *key, *value;                 // S rows, `stride` numbers apart: [H D], [K D], [K D]
    const bf16 *cosines, *sines;                     // [S D]
    const bf16 *query_norm, *key_norm;               // [D], or null: norms of each head before its rotation
    bf16 *keys, *values;                             // [S K capacity D]
    const bf16 *prompt_keys, *prompt_values;         // [P K prompt_capacity D], or null
    bf16* out;                                       // [S H D]
    const int64_t* lengths;                          // [S] tokens in each slot, behind which the new one is written
    const int64_t* order;                            // [S] slots, those of one prompt side by side; or null
    const int64_t *prompt_of_slot, *prompt_lengths;  // [S], [P]
    int64_t stride, slots, heads, key_heads, size, capacity, prompt_capacity;
    int64_t window;                                  // tokens that the new one sees, itself among them; 0: all
    int64_t from_one;                                // norms of heads: see `scaled`
    float scale, epsilon;
};

namespace {

// What a norm makes of numbers that have been divided by their root mean square: Llama's rounds them and multiplies by
// the weights, Gemma's multiplies by one plus the weights (`from_one`).
inline floats scaled(floats x, floats weight, bool from_one) {
    return from_one ? x * (1.0f + weight) : rounded(x) * weight;
}

// A head of size 16 V: its norm if it has one, and its rotation.
template <int V>
inline void rotate(const Attention& a, const bf16* from, const bf16* cosines, const bf16* sines, const bf16* norm,
                   floats to[V]) {
    constexpr int SIZE = V * LANES, HALF = SIZE / 2;
    float flat[SIZE], turned[SIZE];
    floats x[V], squares = {};
    for (int i = 0; i < V; i++) {
        x[i] = load(from + i * LANES);
        squares += x[i] * x[i];
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / SIZE + a.epsilon);
    for (int i = 0; norm && i < V; i++) x[i] = rounded(scaled(x[i] * factor, load(norm + i * LANES), a.from_one));
    for (int i = 0; i < V; i++) store(flat + i * LANES, x[i]);
    for (int i = 0; i < HALF; i++) turned[i] = -flat[i + HALF];
    for (int i = 0; i < HALF; i++) turned[i + HALF] = flat[i];
    for (int i = 0; i < V; i++) {
        const floats straight = rounded(x[i] * load(cosines + i * LANES));
        to[i] = rounded(straight + rounded(load(turned + i * LANES) * load(sines + i * LANES)));
    }
}

// Scores of N keys with 16 J queries, which lie transposed: [D, 16 J].
template <int V, int J, int N>
inline void prompt_scores(const bf16* keys, const float* queries, float* scores, floats most[J]) {
    float wide[N][V * LANES];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < V; i++) store(wide[n] + i * LANES, load(keys + (n * V + i) * LANES));
    floats found[N][J] = {};
    for (int d = 0; d < V * LANES; d++)
        for (int j = 0; j < J; j++) {
            const floats query = load(queries + (d * J + j) * LANES);
            for (int n = 0; n < N; n++) found[n][j] += wide[n][d] * query;
        }
    for (int n = 0; n < N; n++)
        for (int j = 0; j < J; j++) {
            store(scores + (n * J + j) * LANES, found[n][j]);
            most[j] = larger(most[j], found[n][j]);
        }
}

// total[n] += the values of so many tokens, weighted by shares[t * by_token + n * by_query].
template <int V, int N>
inline void add_values(
    const bf16* values, int64_t tokens, const float* shares, int64_t by_token, int64_t by_query, float* total) {
    floats sum[N][V];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < V; i++) sum[n][i] = load(total + (n * V + i) * LANES);
    for (int64_t t = 0; t < tokens; t++)
        for (int i = 0; i < V; i++) {
            const floats value = load(values + (t * V + i) * LANES);
            for (int n = 0; n < N; n++) sum[n][i] += shares[t * by_token + n * by_query] * value;
        }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < V; i++) store(total + (n * V + i) * LANES, sum[n][i]);
}

template <int V>
void weighted_values(const bf16* values, int64_t tokens, const float* shares, int64_t by_token, int64_t by_query,
                     int64_t queries, float* total) {
    constexpr int MOST = V <= 5 ? 4 : V <= 8 ? 2 : 1;  // as many sums as registers hold
    for (; queries >= MOST; queries -= MOST, shares += MOST * by_query, total += MOST * V * LANES)
        add_values<V, MOST>(values, tokens, shares, by_token, by_query, total);
    if (queries == 3) add_values<V, 3>(values, tokens, shares, by_token, by_query, total);
    if (queries == 2) add_values<V, 2>(values, tokens, shares, by_token, by_query, total);
    if (queries == 1) add_values<V, 1>(values, tokens, shares, by_token, by_query, total);
}

// Scores of a prompt's tokens that lie before the window of a query's slot count nothing: `most` is found anew.
template <int J>
void hide_prompt(const Attention& a, const int64_t* slots, int64_t queries, int64_t before, float* scores,
                 floats most[J]) {
    const int64_t group = a.heads / a.key_heads;
    ints first[J] = {};
    for (int64_t q = 0; q < queries; q++)
        first[q / LANES][q % LANES] = std::max<int64_t>(0, before + a.lengths[slots[q / group]] + 1 - a.window);
    for (int j = 0; j < J; j++) most[j] = all(NOTHING);
    for (int64_t t = 0; t < before; t++)
        for (int j = 0; j < J; j++) {
            float* place = scores + (t * J + j) * LANES;
            const floats seen = first[j] > (int32_t)t ? all(NOTHING) : load(place);
            store(place, seen);
            most[j] = larger(most[j], seen);
        }
}

// The queries of one key head, of slots that continue one prompt (or have none).
template <int V, int J>
void attend_together(const Attention& a, const int64_t* slots, int64_t count, int64_t head,
                     std::vector<float>& memory) {
    constexpr int D = V * LANES, ROW = J * LANES;
    const int64_t group = a.heads / a.key_heads, queries = count * group;
    const int64_t prompt = a.prompt_keys ? a.prompt_of_slot[slots[0]] : 0;
    const int64_t before = a.prompt_keys ? a.prompt_lengths[prompt] : 0;
    int64_t longest = 0;
    for (int64_t s = 0; s < count; s++) longest = std::max(longest, a.lengths[slots[s]] + 1);
    const int64_t width = (longest + LANES - 1) / LANES * LANES;
    memory.resize(std::max<size_t>(memory.size(), ROW * D * 3 + before * ROW + queries * width));
    float *flat = memory.data(), *turned = flat + ROW * D, *total = turned + ROW * D;
    float *shared = total + ROW * D, *own = shared + before * ROW;

    // 1. Positions are applied; the new keys and values go to the cache.
    for (int64_t s = 0; s < count; s++) {
        const int64_t slot = slots[s], place = ((slot * a.key_heads + head) * a.capacity + a.lengths[slot]) * D;
        const bf16 *cosines = a.cosines + slot * D, *sines = a.sines + slot * D;
        floats turned_head[V];
        rotate<V>(a, a.key + slot * a.stride + head * D, cosines, sines, a.key_norm, turned_head);
        for (int i = 0; i < V; i++) store(a.keys + place + i * LANES, turned_head[i]);
        std::memcpy(a.values + place, a.value + slot * a.stride + head * D, D * sizeof(bf16));
        for (int64_t g = 0; g < group; g++) {
            const bf16* query = a.query + slot * a.stride + (head * group + g) * D;
            rotate<V>(a, query, cosines, sines, a.query_norm, turned_head);
            for (int i = 0; i < V; i++) store(flat + (s * group + g) * D + i * LANES, turned_head[i] * a.scale);
        }
    }
    // 2. Scores with the prompt's keys, all queries side by side: [token, query].
    floats most[J];
    for (int j = 0; j < J; j++) most[j] = all(NOTHING);
    if (before) {
        for (int d = 0; d < D; d++)
            for (int64_t q = 0; q < ROW; q++) turned[d * ROW + q] = q < queries ? flat[q * D + d] : 0.0f;
        const bf16* keys = a.prompt_keys + (prompt * a.key_heads + head) * a.prompt_capacity * D;
        int64_t t = 0;
        for (; t + 4 <= before; t += 4) prompt_scores<V, J, 4>(keys + t * D, turned, shared + t * ROW, most);
        for (; t < before; t++) prompt_scores<V, J, 1>(keys + t * D, turned, shared + t * ROW, most);
        if (a.window) hide_prompt<J>(a, slots, queries, before, shared, most);
    }
    // 3. Scores of each slot's queries with its own keys: [query, token].
    float highest[ROW], mass[ROW];
    for (int j = 0; j < J; j++) store(highest + j * LANES, most[j]);
    for (int64_t q = 0; q < queries; q++) {
        const int64_t slot = slots[q / group], length = a.lengths[slot] + 1;
        const bf16* keys = a.keys + (slot * a.key_heads + head) * a.capacity * D;
        floats query[V], best = all(NOTHING);
        for (int i = 0; i < V; i++) query[i] = load(flat + q * D + i * LANES);
        for (int64_t t = 0; t < width; t += LANES) {
            floats products[LANES] = {};
            const int64_t here = std::max<int64_t>(0, std::min<int64_t>(LANES, length - t));
            for (int64_t n = 0; n < here; n++)
                for (int i = 0; i < V; i++) products[n] += query[i] * load(keys + (t + n) * D + i * LANES);
            floats found = sums(products);
            const int64_t hidden = a.window ? std::min<int64_t>(LANES, length - a.window - t) : 0;
            for (int64_t n = 0; n < hidden; n++) found[n] = NOTHING;
            for (int64_t n = here; n < LANES; n++) found[n] = NOTHING;
            store(own + q * width + t, found);
            best = larger(best, found);
        }
        highest[q] = std::max(highest[q], largest(best));
    }
    // 4. Exponentials, and their sums.
    floats of_prompt[J] = {};
    for (int64_t t = 0; t < before; t++)
        for (int j = 0; j < J; j++) {
            float* place = shared + t * ROW + j * LANES;
            const floats share = exponential(load(place) - load(highest + j * LANES));
            store(place, share);
            of_prompt[j] += share;
        }
    for (int j = 0; j < J; j++) store(mass + j * LANES, of_prompt[j]);
    for (int64_t q = 0; q < queries; q++) {
        floats of_own = {};
        for (int64_t t = 0; t < width; t += LANES) {
            const floats share = exponential(load(own + q * width + t) - highest[q]);
            store(own + q * width + t, share);
            of_own += share;
        }
        mass[q] += sum(of_own);
    }
    // 5. Weighted values.
    std::fill(total, total + queries * D, 0.0f);
    if (before) {
        const bf16* values = a.prompt_values + (prompt * a.key_heads + head) * a.prompt_capacity * D;
        weighted_values<V>(values, before, shared, ROW, 1, queries, total);
    }
    for (int64_t s = 0; s < count; s++) {
        const int64_t slot = slots[s], first = s * group;
        const bf16* values = a.values + (slot * a.key_heads + head) * a.capacity * D;
        weighted_values<V>(values, a.lengths[slot] + 1, own + first * width, 1, width, group, total + first * D);
        bf16* out = a.out + (slot * a.heads + head * group) * D;
        for (int64_t i = 0; i < group * D; i += LANES)
            store(out + i, load(total + first * D + i) / mass[first + i / D]);
    }
}

template <int V> int attend_all(const Attention& a) {
    // Slots of one prompt read it together, as long as their queries fit two vectors.
    const int64_t group = a.heads / a.key_heads, most = std::max<int64_t>(1, MOST_QUERIES / group);
    std::vector<int64_t> order(a.slots), starts;
    for (int64_t s = 0; s < a.slots; s++) {
        order[s] = a.order ? a.order[s] : s;
        const bool other = s == 0 || (a.prompt_keys && a.prompt_of_slot[order[s]] != a.prompt_of_slot[order[s - 1]]);
        if (other || s - starts.back() == most) starts.push_back(s);
    }
    const int64_t parts = starts.size();
    starts.push_back(a.slots);
#pragma omp parallel
    {
        thread_local std::vector<float> memory;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < parts * a.key_heads; work++) {
            const int64_t part = work / a.key_heads, head = work % a.key_heads, count = starts[part + 1] - starts[part];
            auto attend = count * group <= LANES ? attend_together<V, 1> : attend_together<V, 2>;
            attend(a, order.data() + starts[part], count, head, memory);
        }
    }
    return 0;
}

// functional/sampling.py describes the two levels: first a block of the vocabulary, then a token of it.
template <typename T>
void draw_row(const T* logits, int64_t vocabulary, float temperature, double uniform, int64_t* token, float* logprob) {
    const double below = 1.0 - std::numeric_limits<double>::epsilon();
    const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    thread_local std::vector<double> running;
    running.resize(blocks);
    floats most = all(NOTHING);
    for (int64_t i = 0; i < vocabulary; i += LANES) most = larger(most, load_part(logits + i, vocabulary - i, NOTHING));
    const float highest = largest(most) / temperature;
    auto scaled = [&](int64_t i) { return load_part(logits + i, vocabulary - i, NOTHING) / temperature - highest; };
    // 1. A block, by its share of the probability.
    double total = 0.0;
    for (int64_t block = 0; block < blocks; block++) {
        floats inside = {};
        const int64_t end = std::min((block + 1) * BLOCK, vocabulary);
        for (int64_t i = block * BLOCK; i < end; i += LANES) inside += exponential(scaled(i));
        running[block] = total += sum(inside);
    }
    const double target = std::min(uniform * total, total * below);
    const int64_t found = std::upper_bound(running.begin(), running.end(), target) - running.begin();
    const int64_t block = std::min(found, blocks - 1), start = block * BLOCK;
    const double before = block ? running[block - 1] : 0.0;
    const double share = std::min(std::max((target - before) / (running[block] - before), 0.0), below);
    // 2. A token of the block, with what remains of the uniform number.
    double inner[BLOCK], inside = 0.0;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const floats masses = start + i < vocabulary ? exponential(scaled(start + i)) : floats{};
        for (int lane = 0; lane < LANES; lane++) inner[i + lane] = inside += masses[lane];
    }
    const int64_t within = std::upper_bound(inner, inner + BLOCK, share * inside) - inner;
    *token = std::min(start + within, vocabulary - 1);  // as it is anyway, unless a logit is no number
    *logprob = scaled(*token)[0] - (float)std::log(total);
}

template <typename T>
void draw_rows(const T* logits, int64_t rows, int64_t vocabulary, float temperature, const double* uniform,
               int64_t* tokens, float* logprobs) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        draw_row(logits + row * vocabulary, vocabulary, temperature, uniform[row], tokens + row, logprobs + row);
}

}  // namespace

extern "C" {

int attend(const Attention* a) {  // 1 for another size of heads
    switch (a->size) {
        case 32: return attend_all<2>(*a);
        case 48: return attend_all<3>(*a);
        case 64: return attend_all<4>(*a);
        case 80: return attend_all<5>(*a);
        case 96: return attend_all<6>(*a);
        case 128: return attend_all<8>(*a);
        case 256: return attend_all<16>(*a);
        default: return 1;
    }
}

void norm(const bf16* hidden, const bf16* weight, bf16* out, int64_t rows, int64_t size, float epsilon, int from_one) {
#pragma omp parallel for if (rows * size > (1 << 16))
    for (int64_t row = 0; row < rows; row++) {
        const bf16* own = hidden + row * size;
        floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(own + i) * load(own + i);
        const float factor = 1.0f / std::sqrt(sum(squares) / size + epsilon);
        for (int64_t i = 0; i < size; i += LANES)
            store(out + row * size + i, scaled(load(own + i) * factor, load(weight + i), from_one));
    }
}

void gated(const bf16* gate_up, bf16* out, int64_t rows, int64_t size, int gelu) {
#pragma omp parallel for if (rows * size > (1 << 15))
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const floats gate = load(gate_up + row * 2 * size + i), up = load(gate_up + (row * 2 + 1) * size + i);
            store(out + row * size + i, rounded(gate * sigmoid(gelu ? gelu_inner(gate) : gate)) * up);
        }
}

void draw(const void* logits, int64_t rows, int64_t vocabulary, float temperature, const double* uniform,
          int64_t* tokens, float* logprobs, int narrow) {
    if (narrow) draw_rows((const bf16*)logits, rows, vocabulary, temperature, uniform, tokens, logprobs);
    else draw_rows((const float*)logits, rows, vocabulary, temperature, uniform, tokens, logprobs);
}

#ifdef __AMX_BF16__

// Matrix products in tiles of 16 rows by 32 inputs, by 16 outputs. The system must permit a process to use the tiles.
int products() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // ARCH_REQ_XCOMP_PERM of the tiles' data

static void configure(int first, int second) {  // rows of tiles 0, 1 and 4, and of 2, 3 and 5; 6 and 7 hold weights
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    const int rows[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64, shape.rows[tile] = std::max(rows[tile], 1);
    _tile_loadconfig(&shape);
}

// What a product of R rows reads and writes. Weights lie as [outputs/16][inputs/32][16 pairs][16 outputs][2]; with
// adapters each 16 outputs have `rank` inputs more, which are those of `low` from `first` [outputs/32] on.
struct Multiplication {
    const bf16 *hidden, *weights, *bias;  // [R inputs], above, [outputs] or null
    const bf16* down;                     // to `low`, laid out likewise; or null: no adapters
    bf16 *low, *out;                      // [R width], [R outputs]
    const int64_t* first;
    int64_t rows, inputs, outputs, width, rank;
    int adds;  // 1: out += the product, rounded before; 0: out = the product
};

// The outputs that are this thread's.
static void multiply(const Multiplication& p) {
    constexpr int64_t AHEAD = 8;  // tiles of weights fetched before they are needed: each comes from memory once a step
    constexpr int64_t AT_ONCE = 128;  // rows that read weights from the nearest cache
    const int64_t depth = p.inputs / 32, more = p.rank / 32;
    alignas(64) float found[4][16][LANES];
    int first = 0, second = -1;
    auto add = [&](const bf16* left, const bf16* right, const bf16* own, int64_t stride, bool lower) {
        for (int line = 0; line < 16; line++) {
            __builtin_prefetch(left + line * 32 + AHEAD * TILE);
            __builtin_prefetch(right + line * 32 + AHEAD * TILE);
        }
        _tile_loadd(6, left, 64);
        _tile_loadd(7, right, 64);
        _tile_loadd(4, own, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!lower) return;
        _tile_loadd(5, own + 16 * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    };
    for (int64_t begin = 0; begin < p.rows; begin += AT_ONCE) {
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < p.outputs / 32; block++) {
            const bf16 *left = p.weights + block * 2 * (depth + more) * TILE, *right = left + (depth + more) * TILE;
            for (int64_t row = begin; row < std::min(p.rows, begin + AT_ONCE); row += 32) {
                // 1. Products of up to 32 rows with 32 outputs.
                const int upper = std::min<int64_t>(16, p.rows - row);
                const int lower = std::max<int64_t>(0, std::min<int64_t>(16, p.rows - row - 16));
                if (upper != first || lower != second) configure(first = upper, second = lower);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                const bf16* own = p.hidden + row * p.inputs;
                for (int64_t k = 0; k < depth; k++)
                    add(left + k * TILE, right + k * TILE, own + k * 32, p.inputs, lower);
                const bf16* low = more ? p.low + row * p.width + p.first[block] : nullptr;
                for (int64_t k = 0; k < more; k++)
                    add(left + (depth + k) * TILE, right + (depth + k) * TILE, low + k * 32, p.width, lower);
                _tile_stored(0, found[0], 64);
                _tile_stored(1, found[1], 64);
                _tile_stored(2, found[2], 64);
                _tile_stored(3, found[3], 64);
                // 2. Bias, rounding, and the sum with what is there.
                for (int r = 0; r < upper + lower; r++)
                    for (int j = 0; j < 2; j++) {
                        const int64_t column = block * 32 + j * LANES;
                        bf16* place = p.out + (row + r) * p.outputs + column;
                        floats x = load(found[r / 16 * 2 + j][r % 16]);
                        if (p.bias) x += load(p.bias + column);
                        store(place, p.adds ? load(place) + rounded(x) : x);
                    }
            }
        }
    }
    _tile_release();
}

void product(const Multiplication* p) {
    Multiplication below = {};
    below.hidden = p->hidden, below.weights = p->down, below.out = p->low;
    below.rows = p->rows, below.inputs = p->inputs, below.outputs = p->width;
#pragma omp parallel
    {
        if (p->down) {
            multiply(below);
#pragma omp barrier
        }
        multiply(*p);
    }
}

#else
int products() { return 0; }
struct Multiplication;
void product(const Multiplication*) {}
#endif

}
