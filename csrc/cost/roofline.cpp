#include "roofline.h"

#include <cmath>
#include <cstddef>

#include "../wide.h"

namespace motet {
namespace {

// has_attention: whether pairs take operations. Divisions take longest, so that by a tp that is a power of two it
// multiplies, which gives the same bits.
template <bool has_attention, bool by_power_of_two>
[[gnu::always_inline]] inline void passes(const double* __restrict rows, const double* __restrict pairs, std::size_t count,
                       const LayerRates& given, double* __restrict forward, double* __restrict input,
                       double* __restrict weight) {
    const LayerRates rates = given;  // a copy: what is written can then not change it
    const double share = 1 / rates.tp;
    const auto by_tp = [&](double whole) { return by_power_of_two ? whole * share : whole / rates.tp; };
    for (std::size_t place = 0; place < count; ++place) {
        const double row = rows[place];
        const double filled = rates.weights * (row * rates.width_factor + rates.half_rows) + rates.idle;
        const double computed = 2 * filled / rates.products_per_s;
        const double gradients = computed * rates.gradient_share;
        const double outputs = 2 * row * rates.output_width;
        const double moved = (rates.input_entries + outputs) * rates.element_bytes / rates.bytes_per_s;
        const double added = (rates.gradient_entries + outputs) * rates.element_bytes / rates.bytes_per_s;
        const double product = by_tp(computed < moved ? moved : computed);
        const double of_weights = by_tp(gradients < added ? added : gradients);
        double attention = 0;
        if constexpr (has_attention) {
            const double keys = pairs[place] + rates.half_length * row;
            attention = by_tp(rates.pair_flops * keys) / rates.attention_per_s;
        }
        const double kept = by_tp(row * rates.activation_width * rates.element_bytes) / rates.bytes_per_s;
        const bool runs = row > 0;
        forward[place] = runs ? rates.launch_s + (product + attention + 3 * kept) : 0.0;
        input[place] = runs ? rates.launch_s + (product + 2.5 * attention + 3 * kept) : 0.0;
        weight[place] = runs ? rates.launch_s + (of_weights + 2 * kept) : 0.0;
    }
}

using Passes = void (*)(const double*, const double*, std::size_t, const LayerRates&, double*, double*, double*);

MOTET_WIDE void with_attention(const double* rows, const double* pairs, std::size_t count, const LayerRates& rates,
                               double* forward, double* input, double* weight) {
    passes<true, true>(rows, pairs, count, rates, forward, input, weight);
}

MOTET_WIDE void without_attention(const double* rows, const double* pairs, std::size_t count, const LayerRates& rates,
                                  double* forward, double* input, double* weight) {
    passes<false, true>(rows, pairs, count, rates, forward, input, weight);
}

MOTET_WIDE void divided(const double* rows, const double* pairs, std::size_t count, const LayerRates& rates,
                        double* forward, double* input, double* weight) {
    passes<true, false>(rows, pairs, count, rates, forward, input, weight);
}

}  // namespace

void layer_seconds(std::span<const double> rows, std::span<const double> pairs, const LayerRates& rates,
                   double* forward, double* input, double* weight) {
    int exponent = 0;
    const bool by_power_of_two = std::frexp(rates.tp, &exponent) == 0.5;
    const Passes chosen = !by_power_of_two ? divided : rates.pair_flops > 0 ? with_attention : without_attention;
    chosen(rows.data(), pairs.data(), rows.size(), rates, forward, input, weight);
}

}  // namespace motet
