#include "roofline.h"

#include <algorithm>
#include <cstddef>

#include "../wide.h"

namespace motet {
namespace {

MOTET_WIDE void passes(const double* __restrict rows, const double* __restrict pairs, std::size_t count,
                       const LayerRates& given, double* __restrict forward, double* __restrict input,
                       double* __restrict weight) {
    const LayerRates rates = given;  // a copy: what is written can then not change it
    for (std::size_t place = 0; place < count; ++place) {
        const double row = rows[place];
        const double filled = rates.weights * (row * rates.width_factor + rates.half_rows) + rates.idle;
        const double computed = 2 * filled / rates.products_per_s;
        const double gradients = computed * rates.gradient_share;
        const double outputs = 2 * row * rates.output_width;
        const double moved = (rates.input_entries + outputs) * rates.element_bytes / rates.bytes_per_s;
        const double added = (rates.gradient_entries + outputs) * rates.element_bytes / rates.bytes_per_s;
        const double product = (computed < moved ? moved : computed) / rates.tp;
        const double of_weights = (gradients < added ? added : gradients) / rates.tp;
        const double keys = pairs[place] + rates.half_length * row;
        const double attention = rates.pair_flops * keys / rates.tp / rates.attention_per_s;
        const double kept = row * rates.activation_width * rates.element_bytes / rates.tp / rates.bytes_per_s;
        const bool runs = row > 0;
        forward[place] = runs ? rates.launch_s + (product + attention + 3 * kept) : 0.0;
        input[place] = runs ? rates.launch_s + (product + 2.5 * attention + 3 * kept) : 0.0;
        weight[place] = runs ? rates.launch_s + (of_weights + 2 * kept) : 0.0;
    }
}

}  // namespace

void layer_seconds(std::span<const double> rows, std::span<const double> pairs, const LayerRates& rates,
                   double* forward, double* input, double* weight) {
    passes(rows.data(), pairs.data(), rows.size(), rates, forward, input, weight);
}

}  // namespace motet
