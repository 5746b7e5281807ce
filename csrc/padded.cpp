// The optimum of count times longest; see src/motet/balance/reference/padded.py.
#include <algorithm>

#include "balance.h"

namespace motet {
namespace {

std::vector<std::int64_t> sorted_lengths(Weights lengths, const std::vector<std::int32_t>& order) {
    std::vector<std::int64_t> sorted(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) sorted[i] = lengths[order[i]];
    return sorted;
}

// How many items the batch that begins at `first` holds under `limit`: its first item is its longest.
std::size_t batch_size(const std::vector<std::int64_t>& descending, std::size_t first, std::int64_t limit) {
    const std::size_t rest = descending.size() - first;
    if (descending[first] == 0) return rest;
    return std::min(rest, static_cast<std::size_t>(limit / descending[first]));
}

bool fits(const std::vector<std::int64_t>& descending, int num_ranks, std::int64_t limit) {
    std::size_t first = 0;
    for (int rank = 0; rank < num_ranks && first < descending.size(); ++rank) {
        first += batch_size(descending, first, limit);
    }
    return first == descending.size();
}

std::int64_t optimum(const std::vector<std::int64_t>& descending, int num_ranks) {
    if (descending.empty()) return 0;
    const std::int64_t num_items = static_cast<std::int64_t>(descending.size());
    std::int64_t low = descending[0];                                            // the longest item alone
    std::int64_t high = descending[0] * ((num_items + num_ranks - 1) / num_ranks);  // equal counts
    while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if (fits(descending, num_ranks, middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return high;
}

}  // namespace

Placement padded(Weights lengths, int num_ranks) {
    const auto order = heaviest_first(lengths);
    const auto descending = sorted_lengths(lengths, order);
    const std::int64_t limit = optimum(descending, num_ranks);
    Placement placement{std::vector<std::int32_t>(lengths.size()), std::vector<std::int64_t>(num_ranks, 0), limit};
    std::size_t first = 0;
    for (int rank = 0; rank < num_ranks && first < order.size(); ++rank) {
        const std::size_t size = batch_size(descending, first, limit);
        for (std::size_t i = first; i < first + size; ++i) placement.ranks[order[i]] = rank;
        placement.loads[rank] = static_cast<std::int64_t>(size) * descending[first];
        first += size;
    }
    return placement;
}

std::int64_t padded_bound(Weights lengths, int num_ranks) {
    return optimum(sorted_lengths(lengths, heaviest_first(lengths)), num_ranks);
}

}  // namespace motet
