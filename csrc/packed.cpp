// LPT, then swaps; see src/motet/balance/reference/packed.py and bound.py.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <tuple>

#include "balance.h"

namespace motet {
namespace {

constexpr int kMaxItemsForPairs = 64;

struct Item {
    std::int64_t weight;
    std::int32_t number;
};

bool comes_before(const Item& a, const Item& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.number < b.number;
}

// One or two items of a rank, which move together, or nothing.
struct Bundle {
    std::int64_t weight = 0;
    int first = -1, second = -1;  // places in Rank::items, first < second; -1: none
};

struct Rank {
    std::int64_t load = 0;
    std::vector<Item> items;  // heaviest first
    std::vector<Bundle> singles, pairs;  // what can move, heaviest first; empty until it is asked for
};

std::int64_t bound_of(Weights weights, const std::vector<std::int32_t>& order, int num_ranks) {
    std::int64_t divisor = 0, sum = 0;
    for (const auto weight : weights) {
        if (divisor != 1) divisor = std::gcd(divisor, weight);
        sum += weight;
    }
    if (divisor == 0) return 0;
    const std::int64_t units = sum / divisor;
    std::int64_t bound = (units / num_ranks + (units % num_ranks != 0)) * divisor;
    std::vector<std::int64_t> before(order.size() + 1, 0);  // before[i]: sum of the i heaviest
    for (std::size_t i = 0; i < order.size(); ++i) before[i + 1] = before[i] + weights[order[i]];
    for (std::size_t k = 0; k * num_ranks < order.size(); ++k) {
        const std::size_t last = k * num_ranks;
        bound = std::max(bound, before[last + 1] - before[last - k]);
    }
    return bound;
}

// A tournament over ranks: the lightest (then the one with fewer items, then the lower number) is at the root.
class Lightest {
public:
    explicit Lightest(const std::vector<Rank>& ranks)
        : ranks_(ranks), num_leaves_(std::bit_ceil(ranks.size())), winner_(2 * num_leaves_) {
        for (std::size_t leaf = 0; leaf < num_leaves_; ++leaf) winner_[num_leaves_ + leaf] = static_cast<int>(leaf);
        for (std::size_t node = num_leaves_ - 1; node > 0; --node) play(node);
    }
    int rank() const { return winner_[1]; }
    void update(int rank) {
        for (std::size_t node = (num_leaves_ + rank) / 2; node > 0; node /= 2) play(node);
    }

private:
    void play(std::size_t node) {
        const int left = winner_[2 * node], right = winner_[2 * node + 1];
        winner_[node] = beats(right, left) ? right : left;
    }
    bool beats(int right, int left) const {
        if (static_cast<std::size_t>(right) >= ranks_.size()) return false;
        const Rank &a = ranks_[right], &b = ranks_[left];
        return a.load != b.load ? a.load < b.load : a.items.size() < b.items.size();
    }
    const std::vector<Rank>& ranks_;
    std::size_t num_leaves_;
    std::vector<int> winner_;
};

std::vector<Rank> longest_first(Weights weights, const std::vector<std::int32_t>& order, int num_ranks) {
    std::vector<Rank> ranks(num_ranks);
    for (auto& rank : ranks) rank.items.reserve(2 * weights.size() / num_ranks + 2);
    Lightest lightest(ranks);
    for (const auto item : order) {
        const int rank = lightest.rank();
        ranks[rank].items.push_back({weights[item], item});
        ranks[rank].load += weights[item];
        lightest.update(rank);
    }
    return ranks;
}

const std::vector<Bundle>& bundles_of(Rank& rank, bool with_pairs) {
    auto& bundles = with_pairs ? rank.pairs : rank.singles;
    if (!bundles.empty()) return bundles;
    const int num_items = static_cast<int>(rank.items.size());
    for (int i = 0; i < num_items; ++i) bundles.push_back({rank.items[i].weight, i, -1});
    if (!with_pairs || num_items > kMaxItemsForPairs) return bundles;
    for (int i = 0; i < num_items; ++i) {
        for (int j = i + 1; j < num_items; ++j) {
            bundles.push_back({rank.items[i].weight + rank.items[j].weight, i, j});
        }
    }
    std::stable_sort(bundles.begin(), bundles.end(), [](auto& a, auto& b) { return a.weight > b.weight; });
    return bundles;
}

struct Swap {
    Bundle give, take;
};

std::optional<Swap> best_swap(const std::vector<Bundle>& heavy, const std::vector<Bundle>& light, std::int64_t room) {
    const auto light_at = [&](std::size_t place) { return place < light.size() ? light[place] : Bundle{}; };
    std::int64_t smallest_miss = room;
    std::optional<Swap> best;
    std::size_t below = 0;  // the heaviest bundle with which more than half the room would move
    for (const Bundle& give : heavy) {
        const auto consider = [&](const Bundle& take) {
            const std::int64_t change = give.weight - take.weight;
            const std::int64_t miss = std::abs((room - change) - change);
            if (change > 0 && change < room && miss < smallest_miss) {
                smallest_miss = miss;
                best = Swap{give, take};
            }
        };
        while (below <= light.size() && give.weight - light_at(below).weight <= room / 2) ++below;
        if (below > 0) consider(light_at(below - 1));
        if (below <= light.size()) consider(light_at(below));
        if (smallest_miss <= 1) break;
    }
    return best;
}

std::vector<Item> take_out(Rank& rank, const Bundle& bundle) {
    std::vector<Item> taken;
    for (const int place : {bundle.second, bundle.first}) {  // the later place first: the earlier one stays what it is
        if (place < 0) continue;
        taken.push_back(rank.items[place]);
        rank.items.erase(rank.items.begin() + place);
    }
    rank.load -= bundle.weight;
    return taken;
}

void put_in(Rank& rank, const std::vector<Item>& items) {
    for (const Item& item : items) {
        rank.items.insert(std::upper_bound(rank.items.begin(), rank.items.end(), item, comes_before), item);
        rank.load += item.weight;
    }
    rank.singles.clear();
    rank.pairs.clear();
}

// Swaps between the heaviest rank and the lightest that has something to swap, and keeps the order of ranks.
template <class Lighter>
bool swap_once(std::vector<Rank>& ranks, std::vector<int>& lightest_first, bool with_pairs, const Lighter& lighter) {
    Rank& heavy = ranks[lightest_first.back()];
    for (std::size_t place = 0; place < lightest_first.size(); ++place) {
        Rank& light = ranks[lightest_first[place]];
        const std::int64_t room = heavy.load - light.load;
        const auto swap = best_swap(bundles_of(heavy, with_pairs), bundles_of(light, with_pairs), room);
        if (!swap) continue;
        const auto given = take_out(heavy, swap->give);
        const auto taken = take_out(light, swap->take);
        put_in(heavy, taken);
        put_in(light, given);
        // Two ranks have moved; sorting all of them after each swap would cost more than the rest of the solution.
        const int moved[] = {lightest_first[place], lightest_first.back()};
        lightest_first.pop_back();
        lightest_first.erase(lightest_first.begin() + static_cast<std::ptrdiff_t>(place));
        for (const int rank : moved) {
            lightest_first.insert(std::lower_bound(lightest_first.begin(), lightest_first.end(), rank, lighter), rank);
        }
        return true;
    }
    return false;
}

void swap_items(std::vector<Rank>& ranks, std::int64_t bound) {
    std::vector<int> order(ranks.size());
    std::iota(order.begin(), order.end(), 0);
    const auto lighter = [&](int a, int b) { return std::tie(ranks[a].load, a) < std::tie(ranks[b].load, b); };
    std::size_t pair_swaps_left = ranks.size();
    std::sort(order.begin(), order.end(), lighter);
    for (std::size_t swaps_left = 100 + 20 * ranks.size(); swaps_left > 0; --swaps_left) {
        if (ranks[order.back()].load - bound <= (bound >> 17)) return;
        if (swap_once(ranks, order, false, lighter)) continue;
        if (pair_swaps_left == 0 || !swap_once(ranks, order, true, lighter)) return;
        --pair_swaps_left;
    }
}

}  // namespace

Placement packed(Weights weights, int num_ranks) {
    const auto order = heaviest_first(weights);
    const std::int64_t bound = bound_of(weights, order, num_ranks);
    auto ranks = longest_first(weights, order, num_ranks);
    swap_items(ranks, bound);
    Placement placement{std::vector<std::int32_t>(weights.size()), {}, bound};
    for (int rank = 0; rank < num_ranks; ++rank) {
        for (const auto& item : ranks[rank].items) placement.ranks[item.number] = rank;
        placement.loads.push_back(ranks[rank].load);
    }
    return placement;
}

std::int64_t packed_bound(Weights weights, int num_ranks) {
    return bound_of(weights, heaviest_first(weights), num_ranks);
}

}  // namespace motet
