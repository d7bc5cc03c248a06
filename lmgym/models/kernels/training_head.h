// The LM head over some hidden states: log-probabilities of targets, and the gradients by states and head. Logits lie
// transposed, [V R], in bf16: so the head's weights are read as they are, and become the gradient in place.

#pragma once

#include "tiles.h"

struct Head {
    const bf16* hidden;      // [R H]
    const bf16* weight;      // [V H]
    const int64_t* targets;  // [R]
    const int64_t* masked;   // ids that some rows cannot have
    const uint8_t* mask;     // [ids R], where that is so
    const float* shares;     // [R], gradients by the log-probabilities times `scale`
    bf16 *logits, *room;     // [V R'], and room for the factors of products
    float *logprobs, *highest, *mass, *target;  // [R'], of logits times `scale`
    float *by_hidden, *by_weight;               // [R' H]; [V H], to which is added, or null
    int64_t rows, vocabulary, size, masks;
    float scale;
};

namespace {

constexpr int64_t WORDS = 256, WORDS_AT_ONCE = 2048;  // of a block of the vocabulary; of one product's inputs

}  // namespace

extern "C" {

int64_t room_of_head(const Head* h) {  // numbers of it
    const int64_t rows = filled(h->rows);
    return 2 * rows * h->size + WORDS_AT_ONCE * (rows + h->size);
}

void head_logits(const Head* h) {
    const int64_t rows = filled(h->rows), size = h->size, blocks = (h->vocabulary + WORDS - 1) / WORDS;
    std::vector<float> of_blocks(2 * blocks * rows);
    bf16* columns = h->room;
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t k = 0; k < size; k += SIDE)
            lay_words(h->hidden + row * size + k, size, h->rows - row, columns + row * size + k * 16);
#pragma omp parallel
    {
        begin_tiles();
        alignas(64) float sums[SIDE * SIDE];
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < blocks; number++) {
            const int64_t first = number * WORDS, last = std::min(h->vocabulary, first + WORDS);
            // 1. Logits of a block of words.
            for (int64_t row = 0; row < rows; row += SIDE)
                for (int64_t word = first; word < last; word += SIDE) {
                    const Left own = in_rows(h->weight + word * size, size);
                    block<true>(own, columns_of(columns + row * size, size), size / SIDE, sums, SIDE, false);
                    for (int64_t w = 0; w < SIDE; w++)
                        for (int64_t i = 0; i < SIDE; i += LANES)
                            store(h->logits + (word + w) * rows + row + i, load(sums + w * SIDE + i));
                }
            for (int64_t n = 0; n < h->masks; n++)
                for (int64_t row = 0; h->masked[n] >= first && h->masked[n] < last && row < h->rows; row++)
                    if (h->mask[n * h->rows + row]) h->logits[h->masked[n] * rows + row].bits = 0xff80;  // -inf
            // 2. The largest of them, and the sum of their exponentials.
            for (int64_t row = 0; row < rows; row += LANES) {
                floats most = all(-1e30f), total = {};
                for (int64_t word = first; word < last; word++)
                    most = larger(most, load(h->logits + word * rows + row) * h->scale);
                for (int64_t word = first; word < last; word++)
                    total += exponential(load(h->logits + word * rows + row) * h->scale - most);
                store(of_blocks.data() + number * rows + row, most);
                store(of_blocks.data() + (blocks + number) * rows + row, total);
            }
        }
        end_tiles();
    }
    // 3. Of all words.
    for (int64_t row = 0; row < rows; row += LANES) {
        floats most = all(-1e30f), total = {};
        for (int64_t number = 0; number < blocks; number++)
            most = larger(most, load(of_blocks.data() + number * rows + row));
        for (int64_t number = 0; number < blocks; number++)
            total += load(of_blocks.data() + (blocks + number) * rows + row) *
                     exponential(load(of_blocks.data() + number * rows + row) - most);
        store(h->highest + row, most);
        store(h->mass + row, total);
    }
    for (int64_t row = 0; row < h->rows; row++) {
        const uint32_t bits = (uint32_t)h->logits[h->targets[row] * rows + row].bits << 16;
        std::memcpy(h->target + row, &bits, sizeof bits);
        h->target[row] *= h->scale;
        h->logprobs[row] = h->target[row] - (h->highest[row] + std::log(h->mass[row]));
    }
}

// After head_logits: the logits become their gradient.
void head_gradient(const Head* h) {
    const int64_t rows = filled(h->rows), size = h->size, blocks = (h->vocabulary + WORDS - 1) / WORDS;
    bf16 *inputs = h->room + rows * size, *left = inputs + rows * size, *right = left + WORDS_AT_ONCE * rows;
    std::vector<float> factors(rows, 0.0f);
    for (int64_t row = 0; row < h->rows; row++) factors[row] = -h->shares[row] / h->mass[row];
    for (int64_t column = 0; column < size; column += 16)
        for (int64_t k = 0; k < rows; k += SIDE)
            lay_pairs(h->hidden + k * size + column, size, h->rows - k, inputs + column * rows + k * 16);
    // 1. By logits, and by the weights of the same words.
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < blocks; number++) {
            const int64_t first = number * WORDS, last = std::min(h->vocabulary, first + WORDS);
            for (int64_t word = first; word < last; word++)
                for (int64_t row = 0; row < rows; row += LANES) {
                    bf16* place = h->logits + word * rows + row;
                    const floats mass = exponential(load(place) * h->scale - load(h->highest + row));
                    store(place, mass * load(factors.data() + row));
                }
            for (int64_t row = 0; row < h->rows; row++) {
                const int64_t word = h->targets[row];
                if (word < first || word >= last) continue;
                const float mass = std::exp(h->target[row] - h->highest[row]);
                const floats found = rounded(all(mass * factors[row] + h->shares[row]));
                uint32_t bits;
                std::memcpy(&bits, &found, sizeof bits);
                h->logits[word * rows + row].bits = bits >> 16;
            }
            if (h->by_weight)
                multiply_here(in_rows(h->logits + first * rows, rows), columns_of(inputs, rows), last - first, size,
                              rows, h->by_weight + first * size, size, true);
        }
        end_tiles();
    }
    // 2. By hidden states: sums over the whole vocabulary.
    for (int64_t first = 0; first < h->vocabulary; first += WORDS_AT_ONCE) {
        const int64_t words = std::min(WORDS_AT_ONCE, h->vocabulary - first);
#pragma omp parallel
        {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row += 16)
                for (int64_t k = 0; k < words; k += SIDE)
                    lay_transposed(h->logits + (first + k) * rows + row, rows, SIDE, left + row * words + k * 16);
#pragma omp for schedule(static)
            for (int64_t column = 0; column < size; column += 16)
                for (int64_t k = 0; k < words; k += SIDE)
                    lay_pairs(h->weight + (first + k) * size + column, size, SIDE, right + column * words + k * 16);
        }
        multiply_into(in_tiles(left, words), columns_of(right, words), rows, size, words, h->by_hidden, size,
                      first > 0);
    }
}

}  // extern "C"
