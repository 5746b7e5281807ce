// Minimal movement; see src/motet/balance/reference/home.py.
#include "home.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "level.h"

namespace motet {
namespace {

std::vector<Group> groups_of(Weights weights, Home home, const Nodes& nodes, std::int64_t bound) {
    const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    const int num_ranks = nodes.num_ranks();
    std::vector<Group> groups;
    for (int number = 0; number < nodes.count(); ++number) {
        const int first = nodes.firsts[number], last = nodes.firsts[number + 1];
        const auto most = static_cast<__int128>(last - first) * (static_cast<__int128>(bound) + (bound >> 18));
        auto& node = groups.emplace_back();
        node.target = share_of(total, last, num_ranks) - share_of(total, first, num_ranks);
        node.limit = static_cast<std::int64_t>(std::min<__int128>(total, most));
    }
    for (const auto item : heaviest_first(weights)) {
        Group& node = groups[nodes.of_rank[home[item]]];
        node.items.push_back({weights[item], item});
        node.load += weights[item];
    }
    return groups;
}

// Own items on their home ranks, then the imported ones, heaviest first, where the load is furthest below target.
std::vector<Group> ranks_of_node(const Group& node, int first, int size, Home home, std::int64_t bound) {
    std::vector<Group> ranks(size);
    for (int rank = 0; rank < size; ++rank) {
        ranks[rank].target = share_of(node.load, rank + 1, size) - share_of(node.load, rank, size);
        ranks[rank].limit = slightly_above(bound, 17);
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

Placement packed_home(Weights weights, Home home, const Nodes& nodes) {
    const int num_ranks = nodes.num_ranks();
    Placement placement{std::vector<std::int32_t>(weights.size()), {}, packed_bound(weights, num_ranks)};
    auto groups = groups_of(weights, home, nodes, placement.bound);
    level(groups);
    std::vector<Group> ranks;
    for (int node = 0; node < nodes.count(); ++node) {
        auto on_ranks = ranks_of_node(groups[node], nodes.firsts[node], nodes.size(node), home, placement.bound);
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
