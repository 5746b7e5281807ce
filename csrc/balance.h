// Balancing items over ranks: the fast form of src/motet/balance/reference, which says what each algorithm is and why.
// Both give the same ranks for the same input; whoever changes one changes the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace motet {

using Weights = std::span<const std::int64_t>;  // >= 0, with a sum that fits

struct Placement {
    std::vector<std::int32_t> ranks;   // [num_items]
    std::vector<std::int64_t> loads;   // [num_ranks]
    std::int64_t bound = 0;
};

// The bound and a 2^-bits of it, or what fits: no load is above that.
inline std::int64_t slightly_above(std::int64_t bound, int bits) {
    return bound + std::min(bound >> bits, INT64_MAX - bound);
}

// sort.cpp: items by weight, heaviest first; equal weights by item number.
struct SortedItems {
    std::vector<std::int32_t> items;
    std::vector<std::int64_t> weights;
};
void sort_heaviest_first(Weights weights, SortedItems& sorted);
std::vector<std::int32_t> heaviest_first(Weights weights);

// packed.cpp: minimise the largest sum of weights.
Placement packed(Weights weights, int num_ranks, bool equal_counts, std::int64_t num_steps);
std::int64_t packed_bound(Weights weights, int num_ranks);
std::int64_t sorted_bound(Weights descending, int num_ranks);  // the same of weights that are sorted

// swaps.cpp: swap between heavy and light ranks until the heaviest is at the bound or the steps are spent.
// descending: the weights, heaviest first; ranks: of each of them.
void swap_items(Weights descending, std::int64_t bound, bool equal_counts, std::int64_t num_steps,
                std::vector<std::int32_t>& ranks, std::vector<std::int64_t>& loads);

}  // namespace motet
