// The best of several starts, searched; see src/motet/balance/reference/joint.py.
#include "joint.h"

#include <algorithm>
#include <functional>

#include "balance.h"
#include "tournament.h"
#include "wide.h"

namespace motet {
namespace {

constexpr std::int64_t kMaxPeaks = std::int64_t{1} << 29;  // with more, ranks for each example, step 2 is left out

JointProblem problem_of(JointCosts costs, int num_ranks) {
    JointProblem problem{costs, num_ranks, {}, {}, {}};
    std::vector<std::int32_t> examples(costs.num_examples());
    std::vector<std::int64_t> weights(examples.size());
    SortedItems sorted;
    for (int phase = 0; phase < costs.num_phases; ++phase) {
        std::size_t count = 0;  // of the examples with a cost in this phase
        for (int example = 0; example < costs.num_examples(); ++example) {
            examples[count] = example;
            weights[count] = costs.of(example)[phase];
            count += weights[count] > 0;
        }
        sort_heaviest_first({weights.data(), count}, sorted);
        auto& order = problem.orders.emplace_back(count);
        for (std::size_t place = 0; place < count; ++place) order[place] = examples[sorted.items[place]];
        problem.sums.push_back(std::accumulate(sorted.weights.begin(), sorted.weights.end(), std::int64_t{0}));
        problem.bound.push_back(sorted_bound(sorted.weights, num_ranks));
    }
    return problem;
}

void add_loads(const JointProblem& problem, JointState& state, int rank, int example) {
    for (int phase = 0; phase < problem.costs.num_phases; ++phase) {
        state.loads_of(rank)[phase] += problem.costs.of(example)[phase];
    }
}

// The first rank whose largest load over phases, with the example's shares added to loads [num_phases, num_ranks], is
// smallest; peaks [num_ranks] is room to work in.
MOTET_WIDE int lowest_peak(const std::int32_t* shares, const std::int32_t* loads, int num_ranks, int num_phases,
                           std::int32_t* __restrict peaks) {
    for (int rank = 0; rank < num_ranks; ++rank) peaks[rank] = loads[rank] + shares[0];
    for (int phase = 1; phase < num_phases; ++phase) {
        for (int rank = 0; rank < num_ranks; ++rank) {
            peaks[rank] = std::max(peaks[rank], loads[phase * num_ranks + rank] + shares[phase]);
        }
    }
    std::int32_t lowest = peaks[0];
    for (int rank = 1; rank < num_ranks; ++rank) lowest = std::min(lowest, peaks[rank]);
    return static_cast<int>(std::find(peaks, peaks + num_ranks, lowest) - peaks);
}

// Each example's shares of the phases' sums, in 2^-30: int32 [num_examples * num_phases].
std::vector<std::int32_t> shares_of(const JointProblem& problem) {
    const auto num_phases = static_cast<std::size_t>(problem.costs.num_phases);
    std::vector<std::int32_t> shares(problem.costs.values.size());
    for (std::size_t place = 0; place < shares.size(); ++place) {
        const auto sum = std::max<std::int64_t>(problem.sums[place % num_phases], 1);
        const double share = static_cast<double>(problem.costs.values[place]) / static_cast<double>(sum);
        shares[place] = static_cast<std::int32_t>(share * (1 << 30));
    }
    return shares;
}

JointState place_by_peak(const JointProblem& problem) {
    const int num_phases = problem.costs.num_phases, num_ranks = problem.num_ranks;
    const auto shares = shares_of(problem);
    std::vector<std::int64_t> largest;
    for (auto row = shares.begin(); row != shares.end(); row += num_phases) {
        largest.push_back(*std::max_element(row, row + num_phases));
    }
    std::vector<std::int32_t> loads(static_cast<std::size_t>(num_ranks) * num_phases, 0), peaks(num_ranks);
    JointState state(problem);
    for (const auto example : heaviest_first(largest)) {
        const std::int32_t* row = shares.data() + static_cast<std::size_t>(example) * num_phases;
        const int rank = lowest_peak(row, loads.data(), num_ranks, num_phases, peaks.data());
        for (int phase = 0; phase < num_phases; ++phase) loads[phase * num_ranks + rank] += row[phase];
        if (problem.costs.sum_of(example) == 0) continue;
        state.examples[rank].push_back(example);
        add_loads(problem, state, rank, example);
    }
    return state;
}

// Takes LPT over sums in place of the best, if it is better.
void improve_by_sum(const JointProblem& problem, JointState& best) {
    std::vector<std::int64_t> sums;
    for (int example = 0; example < problem.costs.num_examples(); ++example) {
        sums.push_back(problem.costs.sum_of(example));
    }
    SortedItems sorted;
    sort_heaviest_first(sums, sorted);
    const auto costly = std::lower_bound(sorted.weights.begin(), sorted.weights.end(), 0, std::greater<>());
    JointState other(problem);
    std::vector<int> ranks;
    give_to_lightest({sorted.weights.begin(), costly}, std::vector<std::int64_t>(other.examples.size(), 0),
                     [&](std::size_t place, int rank) {
                         ranks.push_back(rank);
                         add_loads(problem, other, rank, sorted.items[place]);
                     });
    if (other.objective() >= best.objective()) return;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
        other.examples[ranks[place]].push_back(sorted.items[place]);
    }
    best = std::move(other);
}

JointState best_state(const JointProblem& problem, std::int64_t max_pairs) {
    JointState best = place_phase_by_phase(problem);
    search_swaps(problem, best, max_pairs / 2);
    const auto is_near = [&] { return best.objective() <= problem.goal(kNearBits); };
    const bool is_large = std::int64_t{problem.costs.num_examples()} * problem.num_ranks > kMaxPeaks;
    if (!is_near() && !is_large && max_pairs > 0) {
        JointState other = place_by_peak(problem);
        search_swaps(problem, other, max_pairs / 2);
        if (other.objective() < best.objective()) best = std::move(other);
    }
    if (!is_near()) improve_by_sum(problem, best);
    return best;
}

}  // namespace

std::int64_t JointState::objective() const {
    const std::size_t num_phases = loads.size() / examples.size();
    std::vector<std::int64_t> largest(num_phases, 0);
    for (auto row = loads.begin(); row != loads.end(); row += static_cast<std::ptrdiff_t>(num_phases)) {
        for (std::size_t phase = 0; phase < num_phases; ++phase) largest[phase] = std::max(largest[phase], row[phase]);
    }
    return std::accumulate(largest.begin(), largest.end(), std::int64_t{0});
}

JointPlacement joint(JointCosts costs, int num_ranks, std::int64_t max_pairs) {
    const JointProblem problem = problem_of(costs, num_ranks);
    JointState state = best_state(problem, max_pairs);
    JointPlacement placement{std::vector<std::int32_t>(costs.num_examples(), -1), std::move(state.loads),
                             problem.bound};
    for (int rank = 0; rank < num_ranks; ++rank) {
        for (const auto example : state.examples[rank]) placement.ranks[example] = rank;
    }
    int next = 0;  // examples that cost nothing are dealt out in turn
    for (auto& rank : placement.ranks) {
        if (rank < 0) rank = next++ % num_ranks;
    }
    return placement;
}

}  // namespace motet
