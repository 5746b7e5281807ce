// Minimal movement; see src/motet/balance/reference/home.py.
#include "home.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "level.h"

namespace motet {
namespace {

std::vector<Group> nodes_of(Weights weights, int num_ranks, Home home, int ranks_per_node, std::int64_t bound) {
    const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    std::vector<Group> nodes;
    for (int first = 0; first < num_ranks; first += ranks_per_node) {
        const int last = std::min(first + ranks_per_node, num_ranks);
        const auto most = static_cast<__int128>(last - first) * (static_cast<__int128>(bound) + (bound >> 18));
        auto& node = nodes.emplace_back();
        node.target = share_of(total, last, num_ranks) - share_of(total, first, num_ranks);
        node.limit = static_cast<std::int64_t>(std::min<__int128>(total, most));
    }
    for (const auto item : heaviest_first(weights)) {
        Group& node = nodes[home[item] / ranks_per_node];
        node.items.push_back({weights[item], item});
        node.load += weights[item];
    }
    return nodes;
}

// Own items on their home ranks, then the imported ones, heaviest first, where the load is furthest below target.
std::vector<Group> ranks_of_node(const Group& node, int first, int size, Home home, std::int64_t bound) {
    std::vector<Group> ranks(size);
    for (int rank = 0; rank < size; ++rank) {
        ranks[rank].target = share_of(node.load, rank + 1, size) - share_of(node.load, rank, size);
        ranks[rank].limit = bound + std::min(bound >> 17, INT64_MAX - bound);
    }
    std::vector<int> rank_of(node.items.size());
    for (std::size_t i = 0; i < node.items.size(); ++i) {
        const int rank = home[node.items[i].number] - first;
        rank_of[i] = rank >= 0 && rank < size ? rank : -1;
        if (rank_of[i] >= 0) ranks[rank].load += node.items[i].weight;
    }
    for (std::size_t i = 0; i < node.items.size(); ++i) {
        if (rank_of[i] >= 0) continue;
        const auto lightest = std::min_element(ranks.begin(), ranks.end(), [](const Group& a, const Group& b) {
            return a.load - a.target < b.load - b.target;
        });
        rank_of[i] = static_cast<int>(lightest - ranks.begin());
        lightest->load += node.items[i].weight;
    }
    for (std::size_t i = 0; i < node.items.size(); ++i) ranks[rank_of[i]].items.push_back(node.items[i]);
    return ranks;
}

}  // namespace

Placement packed_home(Weights weights, int num_ranks, Home home, int ranks_per_node) {
    Placement placement{std::vector<std::int32_t>(weights.size()), {}, packed_bound(weights, num_ranks)};
    auto nodes = nodes_of(weights, num_ranks, home, ranks_per_node, placement.bound);
    level(nodes);
    std::vector<Group> ranks;
    for (const Group& node : nodes) {
        const int first = static_cast<int>(ranks.size());
        auto on_ranks = ranks_of_node(node, first, std::min(ranks_per_node, num_ranks - first), home, placement.bound);
        level(on_ranks);
        std::ranges::move(on_ranks, std::back_inserter(ranks));
    }
    const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    for (int rank = 0; rank < num_ranks; ++rank) {
        ranks[rank].target = share_of(total, rank + 1, num_ranks) - share_of(total, rank, num_ranks);
    }
    level(ranks);
    for (const Group& rank : ranks) {
        for (const Held& item : rank.items) {
            placement.ranks[item.number] = static_cast<std::int32_t>(placement.loads.size());
        }
        placement.loads.push_back(rank.load);
    }
    return placement;
}

}  // namespace motet
