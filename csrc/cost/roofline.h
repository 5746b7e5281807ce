// Seconds of a layer's passes by the roofline of src/motet/cost/analytic.py, in one pass over its microbatches.
#pragma once

#include <cstdint>
#include <span>

namespace motet {

// What the seconds of a layer follow from beside rows and pairs; named as in cost/analytic.py: layer_rates.
struct LayerRates {
    double weights, width_factor, half_rows, idle, products_per_s;
    double input_entries, gradient_entries, output_width, gradient_share;
    double pair_flops, half_length, attention_per_s;
    double activation_width, element_bytes, bytes_per_s, tp, launch_s;
};

// rows, pairs: [n]. forward, input, weight: [n], of a layer that runs where it has rows. The operations are those of
// the reference, in its order.
void layer_seconds(std::span<const double> rows, std::span<const double> pairs, const LayerRates& rates,
                   double* forward, double* input, double* weight);

}  // namespace motet
