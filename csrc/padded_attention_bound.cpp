// What the largest load cannot be below; the proof is in src/motet/balance/reference/padded_attention_bound.py.
#include <algorithm>
#include <cmath>

#include "padded_attention.h"

namespace motet {
namespace {

constexpr double kSteepnesses[] = {3.0, 10.0, 1.0, 0.0};

struct Fractions {
    const Classes& classes;
    int num_ranks;
    double linear, quadratic;
    std::vector<double> sums;  // [num_classes + 1], the lengths of all earlier positions, summed

    // The largest number of items plus weighted tokens that fits under the limit.
    double largest_weight(double limit, double longest, double token_weight) const {
        const double longest_of_all = static_cast<double>(classes.lengths.front());
        const double shortest = static_cast<double>(classes.lengths.back());
        const double attention = quadratic * longest * longest;
        const double few = std::max(std::floor(limit / (attention + linear * longest)), 1.0);
        const double most =
            std::floor((1 + 1e-12) * (limit - linear * (longest - shortest)) / (attention + linear * shortest));
        const double tokens = 2.0 * limit / (linear + std::sqrt(linear * linear + 4.0 * quadratic / few * limit));
        double weight = few + token_weight * std::min(tokens, few * longest_of_all);
        for (const double count : {few + 1, most}) {
            if (few < count && count <= most) {
                weight = std::max(weight, count + token_weight * (limit - attention * count) / linear);
            }
        }
        return weight;
    }

    // False proves that the limit is too small.
    bool reach_end(std::int64_t limit, double steepness) const {
        const auto& lengths = classes.lengths;
        const auto& starts = classes.starts;
        double position = 0;
        std::size_t place = 0;  // the class of the position
        for (int rank = 0; rank < num_ranks; ++rank) {
            const double longest = static_cast<double>(lengths[place]);
            if (longest == 0) return true;
            const double token_weight = steepness * linear / (quadratic * longest * longest);
            const double most = largest_weight(static_cast<double>(limit), longest, token_weight);
            const double so_far = position + token_weight * (sums[place] + (position - starts[place]) * longest);
            const double until = so_far + most;
            while (starts[place + 1] + token_weight * sums[place + 1] <= until) {
                ++place;
                if (place == lengths.size()) return true;
            }
            const double within = until - (starts[place] + token_weight * sums[place]);
            position = starts[place] + within / (1 + token_weight * static_cast<double>(lengths[place]));
        }
        return position >= static_cast<double>(classes.of_items.size()) * (1 - 1e-9);
    }
};

}  // namespace

std::int64_t padded_attention_bound(const Classes& classes, int num_ranks, AttentionCost cost, std::int64_t low,
                                    std::int64_t high) {
    Fractions fractions{classes, num_ranks, static_cast<double>(cost.linear), static_cast<double>(cost.quadratic), {}};
    std::int64_t sum = 0;
    fractions.sums.push_back(0);
    for (std::size_t c = 0; c < classes.lengths.size(); ++c) {
        sum += (classes.starts[c + 1] - classes.starts[c]) * classes.lengths[c];
        fractions.sums.push_back(static_cast<double>(sum));
    }
    for (const double steepness : kSteepnesses) {
        const std::int64_t step = std::max<std::int64_t>(low >> 11, 1);
        if (high - low < step || fractions.reach_end(low + step - 1, steepness)) continue;
        low += step;
        std::int64_t enough = high;
        while (enough - low > step) {
            const std::int64_t middle = low + (enough - low) / 2;
            if (fractions.reach_end(middle, steepness)) {
                enough = middle;
            } else {
                low = middle + 1;
            }
        }
    }
    return low;
}

}  // namespace motet
