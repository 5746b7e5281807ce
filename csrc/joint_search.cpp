// Swaps that help in all phases at once; see src/motet/balance/reference/joint_search.py. The arithmetic is in float32,
// one operation at a time (no fused multiply-add) and in one order, so that it is the same to the bit everywhere.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "joint.h"
#include "wide.h"

namespace motet {
namespace {

constexpr int kNone = -1;               // in place of an example: nothing
constexpr int kMaxCandidates = 128;     // of a rank with more examples, so many spread over its list are tried
constexpr int kPairsPerSwap = 1 << 15;  // pairs compared for one swap
constexpr float kSmallestGain = 1.0f / (1 << 13);  // of the worst rank's penalty
constexpr int kLanes = 8;               // candidates, or ranks, compared at once
constexpr int kFirst = 8;               // so many partners are looked at first, the most promising first
constexpr int kBlock = 32;              // ranks of a block, of which one gains most
constexpr float kRounding = 1.0f / (1 << 15);  // more than 2^-24 for each operation that a gain comes of
constexpr float kNeverTaken = 1e18f;    // weight of what fills the last lanes: no swap with it is best

// What a rank can give: weights [num_phases, num_lanes], a row a phase; the last candidate is nothing. heaviest: of the
// weights.
struct Candidates {
    int num_candidates = 0, num_lanes = 0;
    float heaviest = 0;
    std::vector<float> weights;
};

struct BestPair {
    float penalty = 0;
    int heavy_candidate = 0, light_candidate = 0;
};

// GCC's and Clang's: an operation on all lanes, in as many instructions as the machine needs for them.
using Floats = float __attribute__((vector_size(sizeof(float) * kLanes)));
using Ints = int __attribute__((vector_size(sizeof(int) * kLanes)));

// For each candidate of the light rank, the heavy rank's candidate that leaves both with the lowest penalty, and four
// times that penalty: `least` holds floats of 0 or more by their bits, which are in the same order as integers.
MOTET_WIDE void least_penalties(const Candidates& heavy, const Candidates& light, const float* heavy_excess,
                                const float* light_excess, int num_phases, int* least, int* heavy_candidate) {
    const Ints no_sign = Ints{} + std::numeric_limits<int>::max();
    for (int first = 0; first < light.num_lanes; first += kLanes) {
        Ints lowest = no_sign, lowest_candidate{};
        for (int candidate = 0; candidate < heavy.num_candidates; ++candidate) {
            Floats penalty{};
            for (int phase = 0; phase < num_phases; ++phase) {
                const float given = heavy.weights[phase * heavy.num_lanes + candidate];
                Floats taken;
                std::memcpy(&taken, light.weights.data() + phase * light.num_lanes + first, sizeof taken);
                const Floats a = (heavy_excess[phase] - given) + taken, b = (light_excess[phase] + given) - taken;
                const Floats twice_a = a + Floats(Ints(a) & no_sign), twice_b = b + Floats(Ints(b) & no_sign);
                penalty += twice_a * twice_a + twice_b * twice_b;  // 0 where a or b is negative
            }
            const Ints less = Ints(penalty) < lowest;
            lowest = less ? Ints(penalty) : lowest;
            lowest_candidate = less ? Ints{} + candidate : lowest_candidate;
        }
        std::memcpy(least + first, &lowest, sizeof lowest);
        std::memcpy(heavy_candidate + first, &lowest_candidate, sizeof lowest_candidate);
    }
}

// The largest of the floats, or 0 where none is above it: by their bits, as above.
MOTET_WIDE float largest_above_0(const float* values, int count) {
    int most = 0;
    for (int place = 0; place < count; ++place) most = std::max(most, std::bit_cast<int>(values[place]));
    return std::bit_cast<float>(most);
}

// What each rank and the heavy one would gain by perfect halves. excess: [num_phases, num_lanes]. penalty, gain:
// [num_lanes], of whole lanes.
MOTET_WIDE void gains_of_halves(const float* excess, const float* penalty, int num_lanes, int num_phases, int heavy,
                                float* __restrict gain) {
    for (int first = 0; first < num_lanes; first += kLanes) {
        Floats saved{}, others;
        for (int phase = 0; phase < num_phases; ++phase) {
            const float* of_phase = excess + static_cast<std::ptrdiff_t>(phase) * num_lanes;
            std::memcpy(&others, of_phase + first, sizeof others);
            const Floats half = (of_phase[heavy] + others) * 0.5f;
            const Floats above = half > 0 ? half : Floats{};
            saved += above * above;
        }
        std::memcpy(&others, penalty + first, sizeof others);
        const Floats gained = (penalty[heavy] + others) - 2 * saved;
        std::memcpy(gain + first, &gained, sizeof gained);
    }
}

// The largest load of any rank, kept while single loads change.
class LargestLoad {
public:
    explicit LargestLoad(int num_ranks) {
        while (first_ < num_ranks) first_ *= 2;
        largest_.assign(2 * static_cast<std::size_t>(first_), 0);
    }

    std::int64_t value() const { return largest_[1]; }

    void set(int rank, std::int64_t load) {
        int node = first_ + rank;
        largest_[node] = load;
        for (node /= 2; node > 0; node /= 2) largest_[node] = std::max(largest_[2 * node], largest_[2 * node + 1]);
    }

private:
    int first_ = 1;                      // the first leaf
    std::vector<std::int64_t> largest_;  // of each node of a binary tree: the root is 1, the leaves are the ranks
};

class Search {
public:
    Search(const JointProblem& problem, JointState& state)
        : problem_(problem),
          costs_(problem.costs),
          state_(state),
          scale_(costs_.num_phases),
          num_lanes_((problem.num_ranks + kLanes - 1) / kLanes * kLanes),
          excess_(static_cast<std::size_t>(num_lanes_) * costs_.num_phases),
          penalty_(num_lanes_),
          reach_(problem.num_ranks),
          largest_(costs_.num_phases, LargestLoad(problem.num_ranks)),
          candidates_(problem.num_ranks),
          gain_(num_lanes_),
          heavy_excess_(costs_.num_phases),
          light_excess_(costs_.num_phases) {
        double all = 0;
        for (const auto sum : problem.sums) all += static_cast<double>(sum);
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            const double sum = static_cast<double>(problem.sums[phase]);
            if (sum > 0) scale_[phase] = static_cast<float>(problem.num_ranks / std::sqrt(sum * all));
        }
        for (int rank = 0; rank < problem.num_ranks; ++rank) refresh(rank);
    }

    void run(std::int64_t max_pairs) {
        std::int64_t lowest = objective();
        std::size_t num_kept = 0;
        std::vector<bool> stuck(costs_.num_phases, false);
        while (num_pairs_ < max_pairs && lowest > problem_.goal(kNearBits)) {
            const auto [phase, heavy] = worst(stuck);
            if (phase == kNone) break;
            if (!step(heavy)) {
                stuck[phase] = true;
                continue;
            }
            stuck.assign(stuck.size(), false);
            if (objective() < lowest) {
                lowest = objective();
                num_kept = swaps_.size();
            }
        }
        for (; swaps_.size() > num_kept; swaps_.pop_back()) exchange(swaps_.back().reversed());
    }

private:
    struct Swap {
        int heavy, light, give, take;  // ranks and examples
        Swap reversed() const { return {heavy, light, take, give}; }
    };

    // As of the state, which would look at all ranks.
    std::int64_t objective() const {
        std::int64_t sum = 0;
        for (const LargestLoad& largest : largest_) sum += largest.value();
        return sum;
    }

    // The phase, of those not stuck, and the rank with the largest excess.
    std::pair<int, int> worst(const std::vector<bool>& stuck) const {
        int worst_phase = kNone;
        float most = 0;
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            if (stuck[phase]) continue;
            const float excess = largest_above_0(of_phase(phase), problem_.num_ranks);
            if (excess > most) {
                most = excess;
                worst_phase = phase;
            }
        }
        if (worst_phase == kNone) return {kNone, kNone};
        const float* first = of_phase(worst_phase);
        return {worst_phase, static_cast<int>(std::find(first, first + problem_.num_ranks, most) - first)};
    }

    const float* of_phase(int phase) const {
        return excess_.data() + static_cast<std::ptrdiff_t>(phase) * num_lanes_;
    }

    // The best swap of the rank with the most promising others; false where none lessens their penalty. Of equally good
    // ones, that with the more promising. No swap gains more than perfect halves would, so that few are looked at.
    bool step(int heavy) {
        BestPair best;
        std::uint64_t partner = 0;
        bool found = false;
        float most = kSmallestGain * penalty_[heavy];
        auto& others = promising(heavy);
        const auto first = others.begin() + std::min<std::ptrdiff_t>(kFirst, std::ssize(others));
        std::nth_element(others.begin(), first, others.end());
        std::sort(others.begin(), first);
        for (const auto other : others) {
            const int light = rank_of(other);
            const float both = penalty_[heavy] + penalty_[light];
            if (gain_[light] + rounding(heavy, light, both) < most) continue;
            const BestPair pair = best_pair(heavy, light);
            const float gain = both - pair.penalty;
            if (gain > most || (found && gain == most && other < partner)) {
                most = gain;
                best = pair;
                partner = other;
                found = true;
            }
        }
        if (!found) return false;
        const int light = rank_of(partner);
        const Swap swap{heavy, light, example_at(heavy, best.heavy_candidate), example_at(light, best.light_candidate)};
        exchange(swap);
        refresh(heavy);
        refresh(light);
        swaps_.push_back(swap);
        return true;
    }

    // More than a swap's gain in float32 can be above that of perfect halves. Both come of some dozens of operations,
    // each exact to 2^-24 of its result; a square's base is off by so much of all that it is the sum of.
    float rounding(int heavy, int light, float both) const {
        const float base = std::sqrt(both);
        return kRounding * base * (base + reach_[heavy] + reach_[light]);
    }

    // The ranks with which perfect halves would lessen the penalty most: of each its gain and number in one integer, of
    // which a lower one is more promising. In no order.
    std::vector<std::uint64_t>& promising(int heavy) {
        gains_of_halves(excess_.data(), penalty_.data(), num_lanes_, costs_.num_phases, heavy, gain_.data());
        gain_[heavy] = 0;
        const int pairs_a_rank = candidates_[heavy].num_candidates * candidates_[heavy].num_candidates;
        const auto num_ranks = std::max<std::size_t>(4, kPairsPerSwap / pairs_a_rank);
        find_blocks(num_ranks);
        promising_.clear();
        for (int first = 0, block = 0; first < problem_.num_ranks; first += kBlock, ++block) {
            if (!(most_of_block_[block] >= least_gain_)) continue;
            for (int light = first; light < std::min(first + kBlock, problem_.num_ranks); ++light) {
                if (gain_[light] > 0 && gain_[light] >= least_gain_) {
                    const auto gain = static_cast<std::uint64_t>(~std::bit_cast<std::uint32_t>(gain_[light]));
                    promising_.push_back(gain << 32 | static_cast<std::uint32_t>(light));
                }
            }
        }
        if (promising_.size() > num_ranks) {
            const auto last = promising_.begin() + static_cast<std::ptrdiff_t>(num_ranks);
            std::nth_element(promising_.begin(), last, promising_.end());
            promising_.erase(last, promising_.end());
        }
        num_pairs_ += problem_.num_ranks;
        for (const auto other : promising_) {
            const int num_others = candidates_[rank_of(other)].num_candidates;
            num_pairs_ += static_cast<std::int64_t>(candidates_[heavy].num_candidates) * num_others;
        }
        return promising_;
    }

    // The most that a rank of each block gains, and a gain that at least num_ranks ranks reach: that of as many blocks.
    void find_blocks(std::size_t num_ranks) {
        most_of_block_.clear();
        for (int first = 0; first < problem_.num_ranks; first += kBlock) {
            const int count = std::min(kBlock, problem_.num_ranks - first);
            most_of_block_.push_back(largest_above_0(gain_.data() + first, count));
        }
        least_gain_ = 0;
        if (most_of_block_.size() <= num_ranks) return;
        by_gain_ = most_of_block_;
        const auto last = by_gain_.begin() + static_cast<std::ptrdiff_t>(num_ranks - 1);
        std::nth_element(by_gain_.begin(), last, by_gain_.end(), std::greater<>());
        least_gain_ = *last;
    }

    static int rank_of(std::uint64_t promise) { return static_cast<int>(promise & 0xffffffffu); }

    BestPair best_pair(int heavy, int light) {
        const Candidates &given = candidates_[heavy], &taken = candidates_[light];
        least_.resize(taken.num_lanes);
        heavy_candidate_.resize(taken.num_lanes);
        for (std::size_t phase = 0; phase < scale_.size(); ++phase) {
            heavy_excess_[phase] = of_phase(static_cast<int>(phase))[heavy];
            light_excess_[phase] = of_phase(static_cast<int>(phase))[light];
        }
        least_penalties(given, taken, heavy_excess_.data(), light_excess_.data(), costs_.num_phases, least_.data(),
                        heavy_candidate_.data());
        const auto light_one = std::min_element(least_.begin(), least_.begin() + taken.num_candidates) - least_.begin();
        return {0.25f * std::bit_cast<float>(least_[light_one]), heavy_candidate_[light_one],
                static_cast<int>(light_one)};
    }

    void weigh(int rank) {
        auto& [num_candidates, num_lanes, heaviest, weights] = candidates_[rank];
        const int num_examples = std::min<int>(static_cast<int>(state_.examples[rank].size()), kMaxCandidates);
        num_candidates = num_examples + 1;
        num_lanes = (num_candidates + kLanes - 1) / kLanes * kLanes;
        heaviest = 0;
        weights.assign(static_cast<std::size_t>(num_lanes) * scale_.size(), 0.0f);
        std::fill(weights.begin() + num_candidates, weights.begin() + num_lanes, kNeverTaken);
        for (int candidate = 0; candidate < num_examples; ++candidate) {
            const std::int64_t* costs = costs_.of(example_at(rank, candidate));
            for (std::size_t phase = 0; phase < scale_.size(); ++phase) {
                const float weight = static_cast<float>(costs[phase]) * scale_[phase];
                weights[phase * num_lanes + candidate] = weight;
                heaviest = std::max(heaviest, weight);
            }
        }
    }

    int example_at(int rank, int candidate) const {
        const auto& examples = state_.examples[rank];
        const auto num_candidates = std::min<std::size_t>(examples.size(), kMaxCandidates);
        const bool is_example = static_cast<std::size_t>(candidate) < num_candidates;
        return is_example ? examples[candidate * examples.size() / num_candidates] : kNone;
    }

    void exchange(const Swap& swap) {
        replace(swap.heavy, swap.give, swap.take);
        replace(swap.light, swap.take, swap.give);
    }

    void replace(int rank, int leaving, int entering) {
        auto& examples = state_.examples[rank];
        std::int64_t* loads = state_.loads_of(rank);
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            if (entering != kNone) loads[phase] += costs_.of(entering)[phase];
            if (leaving != kNone) loads[phase] -= costs_.of(leaving)[phase];
        }
        if (leaving == kNone) {
            if (entering != kNone) examples.push_back(entering);
            return;
        }
        const auto place = std::find(examples.begin(), examples.end(), leaving);
        if (entering != kNone) {
            *place = entering;
        } else {
            *place = examples.back();
            examples.pop_back();
        }
    }

    void refresh(int rank) {
        weigh(rank);
        penalty_[rank] = 0;
        reach_[rank] = 0;
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            const std::int64_t load = state_.loads_of(rank)[phase];
            const float x = static_cast<float>(load - problem_.bound[phase]) * scale_[phase];
            excess_[static_cast<std::size_t>(phase) * num_lanes_ + rank] = x;
            if (x > 0) penalty_[rank] += x * x;
            reach_[rank] = std::max(reach_[rank], std::abs(x) + candidates_[rank].heaviest);
            largest_[phase].set(rank, load);
        }
    }

    const JointProblem& problem_;
    JointCosts costs_;
    JointState& state_;
    std::vector<float> scale_;
    int num_lanes_;                       // of all ranks
    std::vector<float> excess_;           // [num_phases, num_lanes]
    std::vector<float> penalty_;          // [num_lanes]
    std::vector<float> reach_;            // [num_ranks]: the largest excess, on either side, and weight
    std::vector<LargestLoad> largest_;    // of each phase
    std::vector<Candidates> candidates_;  // of each rank
    std::vector<Swap> swaps_;
    std::int64_t num_pairs_ = 0;
    std::vector<float> gain_, heavy_excess_, light_excess_;
    std::vector<float> most_of_block_, by_gain_;
    float least_gain_ = 0;
    std::vector<std::uint64_t> promising_;
    std::vector<int> least_, heavy_candidate_;
};

}  // namespace

void search_swaps(const JointProblem& problem, JointState& state, std::int64_t max_pairs) {
    if (max_pairs > 0) Search(problem, state).run(max_pairs);
}

}  // namespace motet
