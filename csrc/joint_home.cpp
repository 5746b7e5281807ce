// Minimal movement in all phases; see src/motet/balance/reference/joint_home.py.
#include "joint_home.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "level.h"

namespace motet {
namespace {

constexpr int kNodeBits = 13, kRankBits = 12;

using Numbers = std::vector<std::int32_t>;

class Examples {
public:
    std::vector<std::int64_t> bound;  // [num_phases]
    Numbers order;                    // those that cost something: by phase, scarcest first, then costliest first

    Examples(std::span<const std::int64_t> costs, std::span<const std::int64_t> sizes, int num_phases, int num_ranks)
        : costs_(costs), num_phases_(num_phases), phases_(num_phases), phase_of_(sizes.size(), -1),
          turns_(sizes.size(), 0) {
        std::vector<std::vector<std::int64_t>> columns(num_phases);
        std::vector<std::ptrdiff_t> num_zeros(num_phases);
        for (int phase = 0; phase < num_phases; ++phase) {
            for (std::size_t i = phase; i < costs.size(); i += num_phases) columns[phase].push_back(costs[i]);
            bound.push_back(packed_bound(columns[phase], num_ranks));
            num_zeros[phase] = std::ranges::count(columns[phase], 0);
        }
        std::iota(phases_.begin(), phases_.end(), 0);
        std::ranges::stable_sort(phases_, [&](int a, int b) { return num_zeros[a] > num_zeros[b]; });
        for (const int phase : phases_) {
            Numbers of_phase;
            for (const auto example : heaviest_first(columns[phase])) {
                if (cost(example, phase) == 0 || phase_of_[example] >= 0) continue;
                phase_of_[example] = phase;
                of_phase.push_back(example);
            }
            order.insert(order.end(), of_phase.begin(), of_phase.end());
            const auto bytes_for_cost = [&](int example) {
                return static_cast<double>(sizes[example]) / static_cast<double>(cost(example, phase));
            };
            std::ranges::stable_sort(of_phase, {}, bytes_for_cost);
            for (std::size_t turn = 0; turn < of_phase.size(); ++turn) {
                turns_[of_phase[turn]] = static_cast<std::int32_t>(turn);
            }
        }
    }

    void level(const Numbers& examples, Numbers& group_of, const std::vector<int>& firsts, int bits) const {
        const int num_groups = static_cast<int>(firsts.size()) - 1;
        std::vector<std::int64_t> totals(num_phases_, 0), loads(static_cast<std::size_t>(num_groups) * num_phases_, 0);
        const auto loads_of = [&](int group) { return &loads[static_cast<std::size_t>(group) * num_phases_]; };
        for (const auto example : examples) {
            move(example, totals.data(), 1);
            if (group_of[example] >= 0) move(example, loads_of(group_of[example]), 1);
        }
        for (const int phase : phases_) {
            std::vector<Group> groups(num_groups);
            for (int group = 0; group < num_groups; ++group) {
                const int first = firsts[group], last = firsts[group + 1];
                const __int128 most = bound[phase], limit = (last - first) * (most + (most >> bits));
                groups[group].load = loads_of(group)[phase];
                groups[group].target = share_of(totals[phase], last, firsts.back()) -
                                       share_of(totals[phase], first, firsts.back());
                groups[group].limit = static_cast<std::int64_t>(std::min<__int128>(limit, INT64_MAX));
            }
            for (const auto example : examples) {
                if (phase_of_[example] != phase) continue;
                if (group_of[example] < 0) {
                    const int least = furthest_below(groups);
                    group_of[example] = least;
                    groups[least].load += cost(example, phase);
                    move(example, loads_of(least), 1);
                }
                groups[group_of[example]].items.push_back({cost(example, phase), example});
            }
            motet::level(groups, turns_);
            for (int group = 0; group < num_groups; ++group) {
                for (const Held& item : groups[group].items) {
                    move(item.number, loads_of(group_of[item.number]), -1);
                    move(item.number, loads_of(group), 1);
                    group_of[item.number] = group;
                }
            }
        }
    }

    std::vector<std::int64_t> loads(const Numbers& ranks, int num_ranks) const {
        std::vector<std::int64_t> loads(static_cast<std::size_t>(num_ranks) * num_phases_, 0);
        for (const auto example : order) {
            move(example, &loads[static_cast<std::size_t>(ranks[example]) * num_phases_], 1);
        }
        return loads;
    }

private:
    std::int64_t cost(int example, int phase) const {
        return costs_[static_cast<std::size_t>(example) * num_phases_ + phase];
    }
    void move(int example, std::int64_t* loads, int sign) const {
        for (int phase = 0; phase < num_phases_; ++phase) loads[phase] += sign * cost(example, phase);
    }
    static int furthest_below(const std::vector<Group>& groups) {
        const auto room = [](const Group& group) { return group.load - group.target; };
        return static_cast<int>(std::ranges::min_element(groups, {}, room) - groups.begin());
    }

    std::span<const std::int64_t> costs_;
    int num_phases_;
    std::vector<int> phases_;  // scarcest first
    Numbers phase_of_;         // of each example, the scarcest of its phases; -1: it costs nothing
    Numbers turns_;            // in its phase, fewest bytes for the cost first
};

std::vector<int> one_each(int num_ranks) {
    std::vector<int> firsts(num_ranks + 1);
    std::iota(firsts.begin(), firsts.end(), 0);
    return firsts;
}

}  // namespace

JointPlacement joint_home(JointCosts costs, Home home, std::span<const std::int64_t> sizes, const Nodes& nodes) {
    const int num_ranks = nodes.num_ranks();
    const Examples examples(costs.values, sizes, costs.num_phases, num_ranks);
    Numbers ranks(home.begin(), home.end()), node_of(home.begin(), home.end());
    for (auto& node : node_of) node = nodes.of_rank[node];
    examples.level(examples.order, node_of, nodes.firsts, kNodeBits);
    std::vector<Numbers> on_nodes(nodes.count());
    for (const auto example : examples.order) on_nodes[node_of[example]].push_back(example);
    Numbers place_of(ranks.size());
    for (int node = 0; node < nodes.count(); ++node) {
        const int first = nodes.firsts[node], size = nodes.size(node);
        for (const auto example : on_nodes[node]) {
            const int place = ranks[example] - first;
            place_of[example] = place >= 0 && place < size ? place : -1;
        }
        examples.level(on_nodes[node], place_of, one_each(size), kRankBits);
        for (const auto example : on_nodes[node]) ranks[example] = first + place_of[example];
    }
    examples.level(examples.order, ranks, one_each(num_ranks), kRankBits);
    auto loads = examples.loads(ranks, num_ranks);
    return {std::move(ranks), std::move(loads), examples.bound};
}

}  // namespace motet
