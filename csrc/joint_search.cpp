// Swaps that help in all phases at once; see src/motet/balance/reference/joint_search.py. The arithmetic is in float32, one
// operation at a time and in one order, so that it is exact to the bit everywhere.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "joint.h"

// A function marked so is compiled twice, and the form that the machine can run is chosen when the core is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MOTET_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define MOTET_WIDE
#endif

namespace motet {
namespace {

constexpr int kNone = -1;             // in place of an example: nothing
constexpr int kMaxSlots = 128;        // of a rank with more examples, so many spread over its list are tried
constexpr int kPairsAStep = 1 << 15;  // compared before a swap is chosen
constexpr float kSmallestGain = 1.0f / (1 << 13);  // of the worst rank's pain

// What a rank can give: weights [num_phases, num_slots], a row a phase; the last slot is nothing.
struct Slots {
    int num_slots = 0;
    std::vector<float> weights;
};

struct Excess {
    std::vector<float> of_phase;  // [num_phases]
    float pain = 0;
};

struct BestPair {
    float pain = 0;
    int heavy_slot = 0, light_slot = 0;
};

// For each slot of the light rank the heavy rank's slot with which both are least in pain, and that pain times four: `least`
// holds floats of 0 or more by their bits, which are in the same order, because comparisons of integers become wide.
MOTET_WIDE void least_pains(const float* heavy, int num_heavy, const float* light, int num_light, const float* heavy_excess,
                            const float* light_excess, int num_phases, float* __restrict pain, int* __restrict least,
                            int* __restrict heavy_slot) {
    std::fill_n(least, num_light, std::numeric_limits<int>::max());
    for (int slot = 0; slot < num_heavy; ++slot) {
        std::fill_n(pain, num_light, 0.0f);
        for (int phase = 0; phase < num_phases; ++phase) {
            const float given = heavy[phase * num_heavy + slot];
            const float heavy_rest = heavy_excess[phase] - given, light_sum = light_excess[phase] + given;
            const float* taken = light + phase * num_light;
            for (int other = 0; other < num_light; ++other) {
                const float a = heavy_rest + taken[other], b = light_sum - taken[other];
                const float twice_a = a + std::fabs(a), twice_b = b + std::fabs(b);  // 0 where it is negative
                pain[other] += twice_a * twice_a + twice_b * twice_b;
            }
        }
        for (int other = 0; other < num_light; ++other) {
            const int bits = std::bit_cast<int>(pain[other]);
            const bool less = bits < least[other];
            least[other] = less ? bits : least[other];
            heavy_slot[other] = less ? slot : heavy_slot[other];
        }
    }
}

class Search {
public:
    Search(const JointProblem& problem, JointState& state)
        : problem_(problem), costs_(problem.costs), state_(state), scale_(costs_.num_phases), excess_(problem.num_ranks) {
        double all = 0;
        for (const auto sum : problem.sums) all += static_cast<double>(sum);
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            const double sum = static_cast<double>(problem.sums[phase]);
            if (sum > 0) scale_[phase] = static_cast<float>(problem.num_ranks / std::sqrt(sum * all));
        }
        for (int rank = 0; rank < problem.num_ranks; ++rank) refresh(rank);
    }

    void run(std::int64_t max_pairs) {
        std::int64_t lowest = state_.objective();
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
            const std::int64_t objective = state_.objective();
            if (objective < lowest) {
                lowest = objective;
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

    // The phase, of those not stuck, and the rank with the largest excess.
    std::pair<int, int> worst(const std::vector<bool>& stuck) const {
        int worst_phase = kNone, worst_rank = kNone;
        float most = 0;
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            if (stuck[phase]) continue;
            for (int rank = 0; rank < problem_.num_ranks; ++rank) {
                const float excess = excess_[rank].of_phase[phase];
                if (excess > most) {
                    most = excess;
                    worst_phase = phase;
                    worst_rank = rank;
                }
            }
        }
        return {worst_phase, worst_rank};
    }

    // The best swap of the rank with the most promising others; false where none lessens their pain.
    bool step(int heavy) {
        slots_of(heavy, heavy_slots_);
        BestPair best;
        int partner = kNone;
        float most = kSmallestGain * excess_[heavy].pain;
        for (const int light : promising(heavy)) {
            slots_of(light, light_slots_);
            const BestPair pair = best_pair(heavy, light);
            const float gain = (excess_[heavy].pain + excess_[light].pain) - pair.pain;
            if (gain > most) {
                most = gain;
                best = pair;
                partner = light;
            }
        }
        if (partner == kNone) return false;
        const Swap swap{heavy, partner, example_at(heavy, best.heavy_slot), example_at(partner, best.light_slot)};
        exchange(swap);
        refresh(heavy);
        refresh(partner);
        swaps_.push_back(swap);
        return true;
    }

    // The ranks with which perfect halves would lessen the pain most.
    std::vector<int> promising(int heavy) {
        std::vector<std::pair<float, int>> ranks;  // negated gain, rank
        for (int light = 0; light < problem_.num_ranks; ++light) {
            if (light == heavy) continue;
            float half = 0;
            for (int phase = 0; phase < costs_.num_phases; ++phase) {
                const float x = (excess_[heavy].of_phase[phase] + excess_[light].of_phase[phase]) * 0.5f;
                if (x > 0) half += x * x;
            }
            const float gain = (excess_[heavy].pain + excess_[light].pain) - 2 * half;
            if (gain > 0) ranks.emplace_back(-gain, light);
        }
        const int pairs_a_rank = heavy_slots_.num_slots * heavy_slots_.num_slots;
        const auto num_ranks = std::min<std::size_t>(ranks.size(), std::max(4, kPairsAStep / pairs_a_rank));
        std::partial_sort(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(num_ranks), ranks.end());
        std::vector<int> chosen;
        for (std::size_t place = 0; place < num_ranks; ++place) chosen.push_back(ranks[place].second);
        num_pairs_ += problem_.num_ranks;
        return chosen;
    }

    BestPair best_pair(int heavy, int light) {
        const int num_light = light_slots_.num_slots;
        pain_.resize(num_light);
        least_.resize(num_light);
        heavy_slot_.resize(num_light);
        least_pains(heavy_slots_.weights.data(), heavy_slots_.num_slots, light_slots_.weights.data(), num_light,
                    excess_[heavy].of_phase.data(), excess_[light].of_phase.data(), costs_.num_phases, pain_.data(),
                    least_.data(), heavy_slot_.data());
        num_pairs_ += static_cast<std::int64_t>(heavy_slots_.num_slots) * num_light;
        const auto slot = std::min_element(least_.begin(), least_.end()) - least_.begin();
        return {0.25f * std::bit_cast<float>(least_[slot]), heavy_slot_[slot], static_cast<int>(slot)};
    }

    void slots_of(int rank, Slots& slots) const {
        const int num_examples = std::min<int>(static_cast<int>(state_.examples[rank].size()), kMaxSlots);
        slots.num_slots = num_examples + 1;
        slots.weights.assign(static_cast<std::size_t>(slots.num_slots) * scale_.size(), 0.0f);
        for (int slot = 0; slot < num_examples; ++slot) {
            const std::int64_t* costs = costs_.of(example_at(rank, slot));
            for (std::size_t phase = 0; phase < scale_.size(); ++phase) {
                slots.weights[phase * slots.num_slots + slot] = static_cast<float>(costs[phase]) * scale_[phase];
            }
        }
    }

    int example_at(int rank, int slot) const {
        const auto& examples = state_.examples[rank];
        const auto num_slots = std::min<std::size_t>(examples.size(), kMaxSlots);
        return static_cast<std::size_t>(slot) < num_slots ? examples[slot * examples.size() / num_slots] : kNone;
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
        Excess& excess = excess_[rank];
        excess.of_phase.resize(scale_.size());
        excess.pain = 0;
        for (int phase = 0; phase < costs_.num_phases; ++phase) {
            const float x = static_cast<float>(state_.loads_of(rank)[phase] - problem_.bound[phase]) * scale_[phase];
            excess.of_phase[phase] = x;
            if (x > 0) excess.pain += x * x;
        }
    }

    const JointProblem& problem_;
    JointCosts costs_;
    JointState& state_;
    std::vector<float> scale_;
    std::vector<Excess> excess_;
    std::vector<Swap> swaps_;
    std::int64_t num_pairs_ = 0;
    Slots heavy_slots_, light_slots_;
    std::vector<float> pain_;
    std::vector<int> least_, heavy_slot_;
};

}  // namespace

void search_swaps(const JointProblem& problem, JointState& state, std::int64_t max_pairs) {
    Search(problem, state).run(max_pairs);
}

}  // namespace motet
