// Phase by phase; see src/motet/balance/reference/joint_phases.py.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <tuple>

#include "balance.h"
#include "changes.h"
#include "joint.h"
#include "tournament.h"

namespace motet {
namespace {

constexpr int kLevelBits = 12;  // a phase is level within 2^-12 of its bound
constexpr int kMaxRounds = 64;
constexpr std::size_t kFewPairs = 1024;  // up to so many are all looked at

struct Entry {
    std::int64_t weight;
    std::int32_t example;
};

// Those of one rank, heaviest first, then by example.
struct Entries {
    std::vector<std::int64_t> weights;
    std::vector<std::int32_t> examples;

    std::size_t size() const { return weights.size(); }
    void clear() {
        weights.clear();
        examples.clear();
    }
    void reserve(std::size_t count) {
        weights.reserve(count);
        examples.reserve(count);
    }
    void append(const Entry& entry) {
        weights.push_back(entry.weight);
        examples.push_back(entry.example);
    }
    void put_in(const Entry& entry) {
        auto place = std::lower_bound(weights.begin(), weights.end(), entry.weight, std::greater<>()) - weights.begin();
        while (place < std::ssize(weights) && weights[place] == entry.weight && examples[place] < entry.example) ++place;
        weights.insert(weights.begin() + place, entry.weight);
        examples.insert(examples.begin() + place, entry.example);
    }
    Entry take_out(std::size_t place) {
        const Entry entry{weights[place], examples[place]};
        weights.erase(weights.begin() + static_cast<std::ptrdiff_t>(place));
        examples.erase(examples.begin() + static_cast<std::ptrdiff_t>(place));
        return entry;
    }
};

// The examples of one phase after the other: placed by LPT, then swapped between heavy and light ranks.
class Level {
public:
    Level(const JointProblem& problem, JointState& state)
        : problem_(problem), costs_(problem.costs), state_(state), entries_(problem.num_ranks) {
        const std::size_t share = problem.costs.num_examples() / entries_.size();
        for (auto& examples : state.examples) examples.reserve(share + share / 2 + 2);
    }

    void begin(int phase) {
        phase_ = phase;
        goal_ = slightly_above(problem_.bound[phase], kLevelBits);
        for (auto& entries : entries_) entries.clear();
    }

    void place_longest_first(const std::vector<std::int32_t>& examples) {
        std::vector<std::int64_t> loads, weights;
        for (int rank = 0; rank < num_ranks(); ++rank) loads.push_back(load(rank));
        for (const auto example : examples) weights.push_back(costs_.of(example)[phase_]);
        for (auto& entries : entries_) entries.reserve(2 * examples.size() / entries_.size() + 2);
        give_to_lightest(weights, loads, [&](std::size_t place, int rank) {
            entries_[rank].append({weights[place], examples[place]});
        });
        for (int rank = 0; rank < num_ranks(); ++rank) {
            for (const auto example : entries_[rank].examples) add(rank, example, 1);
        }
    }

    void swap_in_rounds() {
        for (int round = 0; round < kMaxRounds && swap_round(); ++round) {
        }
    }

    void hand_over() {
        for (int rank = 0; rank < num_ranks(); ++rank) {
            const auto& examples = entries_[rank].examples;
            state_.examples[rank].insert(state_.examples[rank].end(), examples.begin(), examples.end());
        }
    }

private:
    int num_ranks() const { return static_cast<int>(entries_.size()); }
    std::int64_t load(int rank) const { return state_.loads_of(rank)[phase_]; }

    void add(int rank, int example, int sign) {
        std::int64_t* loads = state_.loads_of(rank);
        for (int phase = 0; phase < costs_.num_phases; ++phase) loads[phase] += sign * costs_.of(example)[phase];
    }

    // Each rank swaps once at most. False where the heaviest is level or finds nothing to swap.
    bool swap_round() {
        // Heaviest first, and of equals the last rank: it is the first from the end.
        loads_.clear();
        for (int rank = num_ranks(); rank-- > 0;) loads_.push_back(load(rank));
        sort_heaviest_first(loads_, order_);
        moved_.assign(entries_.size(), false);
        int first = num_ranks() - 1;  // all lighter ones have moved
        for (int heavy = 0; heavy < num_ranks() && !moved_[heavy] && order_.weights[heavy] > goal_; ++heavy) {
            while (first > heavy && moved_[first]) --first;
            int light = first;
            while (light > heavy && (moved_[light] || !swap(heavy, light))) --light;
            if (light == heavy) return heavy > 0;
            moved_[light] = true;
        }
        return order_.weights[0] > goal_;
    }

    // The rank at a place of the order.
    int at(int place) const { return num_ranks() - 1 - order_.items[place]; }

    // Whether a swap, or a move, brings two ranks closer.
    static bool can_swap(const Entries& from, const Entries& to, std::int64_t room) {
        if (from.size() == 0) return false;
        if (from.weights.back() < room) return true;
        if (from.size() * to.size() <= kFewPairs) return any_brings_closer(from.weights, to.weights, room);
        auto taken = to.weights.begin();
        for (const auto given : from.weights) {
            while (taken != to.weights.end() && *taken >= given) ++taken;
            if (taken != to.weights.end() && given - *taken < room) return true;
        }
        return false;
    }

    // The ranks at two places of the order swap, or move, what makes both level, or else brings their loads closest;
    // false where each leaves one as heavy.
    bool swap(int heavy, int light) {
        Entries &from = entries_[at(heavy)], &to = entries_[at(light)];
        const std::int64_t heavy_load = order_.weights[heavy], light_load = order_.weights[light];
        const std::int64_t room = heavy_load - light_load;
        if (!can_swap(from, to, room)) return false;
        const std::int64_t enough = (goal_ - heavy_load) + (goal_ - light_load);  // with that miss both are level
        const auto takable = [&](std::size_t place) { return place < to.size() ? to.weights[place] : 0; };
        std::int64_t smallest_miss = room;
        std::size_t give = 0, take = 0, below = 0;  // below: the first place that leaves more than half the room
        for (std::size_t place = 0; place < from.size(); ++place) {
            const std::int64_t weight = from.weights[place];
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
        const Entry given = take_out(at(heavy), give);
        if (is_swap) put_in(at(heavy), take_out(at(light), take));
        put_in(at(light), given);
        return true;
    }

    Entry take_out(int rank, std::size_t place) {
        const Entry entry = entries_[rank].take_out(place);
        add(rank, entry.example, -1);
        return entry;
    }

    void put_in(int rank, const Entry& entry) {
        entries_[rank].put_in(entry);
        add(rank, entry.example, 1);
    }

    const JointProblem& problem_;
    JointCosts costs_;
    JointState& state_;
    int phase_ = 0;
    std::int64_t goal_ = 0;
    std::vector<Entries> entries_;
    std::vector<std::int64_t> loads_;
    SortedItems order_;        // of the ranks, counted from the last one
    std::vector<char> moved_;  // whether the rank at a place of the order has swapped in this round
};

}  // namespace

JointState place_phase_by_phase(const JointProblem& problem) {
    std::vector<int> phases(problem.costs.num_phases);
    std::iota(phases.begin(), phases.end(), 0);
    std::stable_sort(phases.begin(), phases.end(),
                     [&](int a, int b) { return problem.orders[a].size() < problem.orders[b].size(); });
    JointState state(problem);
    Level level(problem, state);
    std::vector<bool> placed(problem.costs.num_examples(), false);
    for (const int phase : phases) {
        std::vector<std::int32_t> examples;
        for (const auto example : problem.orders[phase]) {
            if (!placed[example]) examples.push_back(example);
            placed[example] = true;
        }
        level.begin(phase);
        level.place_longest_first(examples);
        level.swap_in_rounds();
        level.hand_over();
    }
    return state;
}

}  // namespace motet
