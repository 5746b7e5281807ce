// Phase by phase; see src/motet/balance/reference/joint_phases.py.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <utility>

#include "joint.h"
#include "tournament.h"

namespace motet {
namespace {

constexpr int kLevelBits = 12;  // a phase is level within 2^-12 of its bound
constexpr int kMaxRounds = 64;

struct Entry {
    std::int64_t weight;
    std::int32_t example;
};

bool comes_before(const Entry& a, const Entry& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.example < b.example;
}

using Entries = std::vector<Entry>;  // of one rank, heaviest first

// The examples of one phase: placed by LPT, then swapped between heavy and light ranks.
class Level {
public:
    Level(const JointProblem& problem, JointState& state, int phase)
        : costs_(problem.costs), state_(state), phase_(phase), entries_(problem.num_ranks) {
        const std::int64_t bound = problem.bound[phase];
        goal_ = bound + (bound >> kLevelBits);
    }

    void place_longest_first(const std::vector<std::int32_t>& examples) {
        std::vector<std::int64_t> loads;
        for (int rank = 0; rank < num_ranks(); ++rank) loads.push_back(load(rank));
        Tournament tournament(loads);
        for (auto& entries : entries_) entries.reserve(2 * examples.size() / entries_.size() + 2);
        for (const auto example : examples) {
            const int rank = tournament.lightest();
            const std::int64_t weight = costs_.of(example)[phase_];
            tournament.add_to_lightest(weight);
            entries_[rank].push_back({weight, example});
        }
        for (int rank = 0; rank < num_ranks(); ++rank) {
            for (const Entry& entry : entries_[rank]) add(rank, entry.example, 1);
        }
    }

    void swap_in_rounds() {
        for (int round = 0; round < kMaxRounds && swap_round(); ++round) {
        }
    }

    void hand_over() {
        for (int rank = 0; rank < num_ranks(); ++rank) {
            for (const Entry& entry : entries_[rank]) state_.examples[rank].push_back(entry.example);
        }
    }

private:
    using Loaded = std::pair<std::int64_t, int>;  // a rank's load, and the rank

    int num_ranks() const { return static_cast<int>(entries_.size()); }
    std::int64_t load(int rank) const { return state_.loads_of(rank)[phase_]; }

    void add(int rank, int example, int sign) {
        std::int64_t* loads = state_.loads_of(rank);
        for (int phase = 0; phase < costs_.num_phases; ++phase) loads[phase] += sign * costs_.of(example)[phase];
    }

    // Each rank swaps once at most. False where the heaviest is level or finds nothing to swap.
    bool swap_round() {
        std::vector<Loaded> order;
        for (int rank = 0; rank < num_ranks(); ++rank) order.emplace_back(load(rank), rank);
        std::sort(order.begin(), order.end());
        std::vector<char> moved(order.size(), false);
        std::size_t first = 0;  // all lighter ones have moved
        for (std::size_t heavy = order.size(); heavy-- > 0 && !moved[heavy] && order[heavy].first > goal_;) {
            while (first < heavy && moved[first]) ++first;
            std::size_t light = first;
            while (light < heavy && (moved[light] || !swap(order[heavy], order[light]))) ++light;
            if (light == heavy) return heavy + 1 < order.size();
            moved[light] = true;
        }
        return order.back().first > goal_;
    }

    // The least above 0 that a swap, or a move, takes from one rank to the other; most pairs of ranks have none below
    // their room.
    static std::int64_t smallest_change(const Entries& from, const Entries& to) {
        std::int64_t smallest = std::numeric_limits<std::int64_t>::max();
        auto taken = to.begin();
        for (const Entry& given : from) {
            while (taken != to.end() && taken->weight >= given.weight) ++taken;
            smallest = std::min(smallest, given.weight - (taken == to.end() ? 0 : taken->weight));
        }
        return smallest;
    }

    // A swap, or move, that makes both level, or else brings their loads closest; false where each leaves one as heavy.
    bool swap(const Loaded& heavy, const Loaded& light) {
        Entries &from = entries_[heavy.second], &to = entries_[light.second];
        const std::int64_t room = heavy.first - light.first;
        if (smallest_change(from, to) >= room) return false;
        const std::int64_t enough = (goal_ - heavy.first) + (goal_ - light.first);  // with that miss both are level
        const auto takable = [&](std::size_t place) { return place < to.size() ? to[place].weight : 0; };
        std::int64_t smallest_miss = room;
        std::size_t give = 0, take = 0, below = 0;  // below: the first place that leaves more than half the room
        for (std::size_t place = 0; place < from.size(); ++place) {
            const std::int64_t weight = from[place].weight;
            while (below <= to.size() && weight - takable(below) <= room / 2) ++below;
            for (std::size_t other = below ? below - 1 : 0; other <= std::min(below, to.size()); ++other) {
                const std::int64_t change = weight - takable(other);
                const std::int64_t miss = std::abs((room - change) - change);
                if (change <= 0 || change >= room || miss >= smallest_miss) continue;
                std::tie(smallest_miss, give, take) = std::tie(miss, place, other);
            }
            if (smallest_miss <= enough) break;
        }
        if (smallest_miss == room) return false;
        const bool is_swap = take < to.size();
        const Entry given = take_out(heavy.second, give);
        if (is_swap) put_in(heavy.second, take_out(light.second, take));
        put_in(light.second, given);
        return true;
    }

    Entry take_out(int rank, std::size_t place) {
        const Entry entry = entries_[rank][place];
        entries_[rank].erase(entries_[rank].begin() + static_cast<std::ptrdiff_t>(place));
        add(rank, entry.example, -1);
        return entry;
    }

    void put_in(int rank, const Entry& entry) {
        Entries& entries = entries_[rank];
        entries.insert(std::lower_bound(entries.begin(), entries.end(), entry, comes_before), entry);
        add(rank, entry.example, 1);
    }

    JointCosts costs_;
    JointState& state_;
    int phase_;
    std::int64_t goal_;
    std::vector<Entries> entries_;
};

}  // namespace

JointState place_phase_by_phase(const JointProblem& problem) {
    std::vector<int> phases(problem.costs.num_phases);
    std::iota(phases.begin(), phases.end(), 0);
    std::stable_sort(phases.begin(), phases.end(),
                     [&](int a, int b) { return problem.orders[a].size() < problem.orders[b].size(); });
    JointState state(problem);
    std::vector<bool> placed(problem.costs.num_examples(), false);
    for (const int phase : phases) {
        std::vector<std::int32_t> examples;
        for (const auto example : problem.orders[phase]) {
            if (!placed[example]) examples.push_back(example);
            placed[example] = true;
        }
        Level level(problem, state, phase);
        level.place_longest_first(examples);
        level.swap_in_rounds();
        level.hand_over();
    }
    return state;
}

}  // namespace motet
