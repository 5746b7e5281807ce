// LPT, and the bound; see src/motet/balance/reference/packed.py and bound.py. The swaps that follow are in swaps.cpp.
#include <algorithm>
#include <bit>
#include <numeric>

#include "balance.h"
#include "tournament.h"

namespace motet {
namespace {

std::int64_t greatest_common_divisor(Weights descending) {
    std::int64_t divisor = 0, last = 0;
    for (const auto weight : descending) {
        if (weight == last) continue;  // of tiles there are many, but few sizes
        divisor = std::gcd(divisor, weight);
        if (divisor == 1) break;
        last = weight;
    }
    return divisor;
}

// Keys hold, from the high bits down, the count (where counts must be equal), the load and the rank.
template <class Key>
void longest_first(Weights descending, int num_ranks, int rank_bits, Key one_item, std::vector<std::int32_t>& ranks) {
    std::vector<Key> keys(num_ranks);
    std::iota(keys.begin(), keys.end(), Key{0});
    Smallest<Key> smallest(keys);
    const Key rank_mask = (Key{1} << rank_bits) - 1;
    for (std::size_t place = 0; place < descending.size(); ++place) {
        const Key key = smallest.key();
        ranks[place] = static_cast<std::int32_t>(key & rank_mask);
        smallest.grow(ranks[place], key + (static_cast<Key>(descending[place]) << rank_bits) + one_item);
    }
}

// LPT: the rank of each place in the order of weights.
void longest_first(Weights descending, int num_ranks, bool equal_counts, std::vector<std::int32_t>& ranks) {
    using Narrow = std::uint64_t;
    using Wide = unsigned __int128;
    ranks.resize(descending.size());
    if (descending.empty()) return;
    const auto sum = static_cast<Narrow>(std::accumulate(descending.begin(), descending.end(), std::int64_t{0}));
    // The rank that is chosen is at most at the mean, so that no load passes mean + longest.
    const int load_bits = std::bit_width(sum / num_ranks + 1 + static_cast<Narrow>(descending[0]));
    const int rank_bits = std::bit_width(static_cast<unsigned>(num_ranks - 1));
    const int count_bits = equal_counts ? std::bit_width(descending.size() / num_ranks + 1) : 0;
    if (rank_bits + load_bits + count_bits <= 64) {
        const auto one_item = equal_counts ? Narrow{1} << (rank_bits + load_bits) : Narrow{0};
        longest_first<Narrow>(descending, num_ranks, rank_bits, one_item, ranks);
    } else {
        const auto one_item = equal_counts ? Wide{1} << (rank_bits + load_bits) : Wide{0};
        longest_first<Wide>(descending, num_ranks, rank_bits, one_item, ranks);
    }
    if (equal_counts) return;
    const auto zeros = std::lower_bound(descending.begin(), descending.end(), 0, std::greater<>()) - descending.begin();
    for (auto place = zeros; place < std::ssize(descending); ++place) {
        ranks[place] = static_cast<std::int32_t>((place - zeros) % num_ranks);
    }
}

}  // namespace

std::int64_t sorted_bound(Weights descending, int num_ranks) {
    const std::int64_t divisor = greatest_common_divisor(descending);
    if (divisor == 0) return 0;
    const std::int64_t units = std::accumulate(descending.begin(), descending.end(), std::int64_t{0}) / divisor;
    std::int64_t bound = (units / num_ranks + (units % num_ranks != 0)) * divisor;
    std::int64_t sum = 0;  // of the k + 1 lightest among the k * num_ranks + 1 heaviest
    std::size_t first = 0, last = 0;
    for (std::size_t k = 0; k * num_ranks < descending.size(); ++k) {
        for (; last <= k * num_ranks; ++last) sum += descending[last];
        for (; first < k * num_ranks - k; ++first) sum -= descending[first];
        bound = std::max(bound, sum);
    }
    return bound;
}

Placement packed(Weights weights, int num_ranks, bool equal_counts, std::int64_t num_steps) {
    // Kept from call to call: fresh memory of this size costs as much as LPT.
    static thread_local SortedItems sorted;
    static thread_local std::vector<std::int32_t> ranks;
    sort_heaviest_first(weights, sorted);
    longest_first(sorted.weights, num_ranks, equal_counts, ranks);
    Placement placement{std::vector<std::int32_t>(weights.size()), std::vector<std::int64_t>(num_ranks, 0),
                        sorted_bound(sorted.weights, num_ranks)};
    for (std::size_t place = 0; place < ranks.size(); ++place) placement.loads[ranks[place]] += sorted.weights[place];
    swap_items(sorted.weights, placement.bound, equal_counts, num_steps, ranks, placement.loads);
    for (std::size_t place = 0; place < ranks.size(); ++place) placement.ranks[sorted.items[place]] = ranks[place];
    return placement;
}

std::int64_t packed_bound(Weights weights, int num_ranks) {
    SortedItems sorted;
    sort_heaviest_first(weights, sorted);
    return sorted_bound(sorted.weights, num_ranks);
}

}  // namespace motet
