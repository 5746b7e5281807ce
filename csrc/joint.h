// Whole examples on ranks so that all phases are balanced at once: the fast form of joint.py, joint_phases.py and
// joint_search.py in src/motet/balance/reference, which say what is decided and why. Both give the same ranks.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "balance.h"

namespace motet {

struct JointCosts {
    std::span<const std::int64_t> values;  // [num_examples * num_phases], a row an example, >= 0, with a sum that fits
    int num_phases;

    int num_examples() const { return static_cast<int>(values.size() / static_cast<std::size_t>(num_phases)); }
    const std::int64_t* of(int example) const {
        return values.data() + static_cast<std::size_t>(example) * static_cast<std::size_t>(num_phases);
    }
    std::int64_t sum_of(int example) const {
        return std::accumulate(of(example), of(example) + num_phases, std::int64_t{0});
    }
};

struct JointPlacement {
    std::vector<std::int32_t> ranks;  // [num_examples]
    std::vector<std::int64_t> loads;  // [num_ranks * num_phases], a row a rank
    std::vector<std::int64_t> bound;  // [num_phases]
};

// What the starts and the search share.
struct JointProblem {
    JointCosts costs;
    int num_ranks;
    std::vector<std::vector<std::int32_t>> orders;  // by phase: the examples with a cost in it, heaviest first
    std::vector<std::int64_t> sums, bound;          // [num_phases]

    std::int64_t goal(int bits) const {  // the summed bounds and a 2^-bits of them
        return slightly_above(std::accumulate(bound.begin(), bound.end(), std::int64_t{0}), bits);
    }
};

// Examples on ranks, with each rank's loads.
struct JointState {
    std::vector<std::vector<std::int32_t>> examples;  // by rank
    std::vector<std::int64_t> loads;                  // [num_ranks * num_phases]

    explicit JointState(const JointProblem& problem)
        : examples(problem.num_ranks), loads(examples.size() * static_cast<std::size_t>(problem.costs.num_phases), 0) {}
    std::int64_t* loads_of(int rank) { return loads.data() + loads.size() / examples.size() * rank; }
    const std::int64_t* loads_of(int rank) const { return loads.data() + loads.size() / examples.size() * rank; }
    std::int64_t objective() const;  // sum over phases of the largest load
};

// Within 2^-kNearBits of the bounds a placement is good enough.
constexpr int kNearBits = 11;

// joint_phases.cpp: the scarcest phase first, each by LPT and swaps among the examples that it places.
JointState place_phase_by_phase(const JointProblem& problem);

// joint_search.cpp: swaps that bring the worst ranks closer to the bound in all phases; max_pairs may be compared.
void search_swaps(const JointProblem& problem, JointState& state, std::int64_t max_pairs);

// joint.cpp: the best of several starts, searched.
JointPlacement joint(JointCosts costs, int num_ranks, std::int64_t max_pairs);

}  // namespace motet
