// Swaps between heavy and light ranks; see src/motet/balance/reference/swaps.py.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>

#include "balance.h"

namespace motet {
namespace {

constexpr int kMovable = 32;         // so many of a rank's items move, the lightest
constexpr int kPairable = 16;        // so many of these form pairs
constexpr int kPairRounds = 16;
constexpr int kStepsPerBundle = 8;   // a bundle is made and sorted before it is looked at
constexpr int kStepsPerShake = 16;

// One or two items of a rank that move together, by their places in the order of weights; second -1: one.
struct Bundle {
    std::int64_t weight = 0;
    std::int32_t first = -1, second = -1;
};

// The items of a rank that can move, lightest first.
struct Movable {
    std::int32_t size = 0;
    std::array<std::int32_t, kMovable> places;

    void insert(std::int32_t place) {
        auto* const at = std::lower_bound(places.data(), places.data() + size, place, std::greater<>());
        if (at == places.data() + kMovable) return;
        if (size < kMovable) ++size;  // else the heaviest is pushed out and stays where it is
        std::move_backward(at, places.data() + size - 1, places.data() + size);
        *at = place;
    }
    void erase(std::int32_t place) {
        auto* const at = std::lower_bound(places.data(), places.data() + size, place, std::greater<>());
        std::move(at + 1, places.data() + size, at);
        --size;
    }
};

// Numbers that look random and are the same everywhere: a linear congruential generator, its high bits.
class Dice {
public:
    std::int32_t below(std::size_t limit) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::int32_t>((state_ >> 33) % limit);
    }

private:
    std::uint64_t state_ = 0;
};

struct Match {
    const Bundle *give, *take;
};

// What to give and take so that two loads, `room` apart, come closest, or as close as `enough`; no match where each
// swap leaves one of them as heavy as the heavier was. Bundles are lightest first.
std::optional<Match> best_match(const std::vector<Bundle>& heavy, const std::vector<Bundle>& light, std::int64_t room,
                                std::int64_t enough) {
    std::int64_t smallest_miss = room;
    std::optional<Match> best;
    std::size_t place = 0;  // the lightest with which at most half the room moves; with the one before it, more moves
    for (const Bundle& give : heavy) {
        const auto consider = [&](const Bundle& take) {
            const std::int64_t change = give.weight - take.weight;
            const std::int64_t miss = std::abs((room - change) - change);
            if (change > 0 && change < room && miss < smallest_miss) {
                smallest_miss = miss;
                best = Match{&give, &take};
            }
        };
        while (place < light.size() && give.weight - light[place].weight > room / 2) ++place;
        if (place < light.size()) consider(light[place]);
        if (place > 0) consider(light[place - 1]);
        if (smallest_miss <= enough) break;
    }
    return best;
}

class Swaps {
public:
    Swaps(Weights descending, std::int64_t bound, bool equal_counts, std::int64_t num_steps,
          std::vector<std::int32_t>& ranks, std::vector<std::int64_t>& loads)
        : weights_(descending),
          target_(bound + (bound >> 17)),
          equal_counts_(equal_counts),
          steps_left_(num_steps),
          ranks_(ranks),
          loads_(loads),
          num_ranks_(static_cast<int>(loads.size())) {}

    void run() {
        sort_ranks();
        if (loads_[at(0)] <= target_) return;
        find_movable();
        while (steps_left_ > 0 && loads_[at(0)] > target_) {
            if (!swap_in_rounds(false) && !swap_in_rounds(true) && !shake()) return;
        }
    }

private:
    // The rank at a place in the order of loads, heaviest first; from the end: lightest first.
    std::int32_t at(int place) const { return order_.items[place]; }
    std::int32_t from_end(int place) const { return order_.items[num_ranks_ - 1 - place]; }

    void sort_ranks() {
        sort_heaviest_first(loads_, order_);
        steps_left_ -= num_ranks_;
    }

    void find_movable() {
        counts_.assign(num_ranks_, 0);
        movable_.assign(num_ranks_, {});
        for (auto place = static_cast<std::int32_t>(ranks_.size()); place-- > 0;) {
            ++counts_[ranks_[place]];
            Movable& movable = movable_[ranks_[place]];
            const bool third = movable.size > 1 && weights_[movable.places[movable.size - 2]] == weights_[place];
            if (movable.size < kMovable && !third) movable.places[movable.size++] = place;
        }
    }

    // The heaviest rank with the lightest, the next with the next, and so on; in the round after, with the ranks
    // one place further, until the heaviest has found a swap.
    bool swap_in_rounds(bool with_pairs) {
        const int num_rounds = with_pairs ? std::min(kPairRounds, num_ranks_ - 1) : num_ranks_ - 1;
        for (int shift = 0; shift < num_rounds && steps_left_ > 0; ++shift) {
            bool heaviest_swapped = false, any_swapped = false;
            for (int place = 0; place < num_ranks_ - 1 - shift - place; ++place) {
                if (loads_[at(place)] <= target_) break;
                const bool swapped = swap(at(place), from_end(place + shift), with_pairs);
                heaviest_swapped |= swapped && place == 0;
                any_swapped |= swapped;
            }
            if (any_swapped) sort_ranks();
            if (heaviest_swapped) return true;
        }
        return false;
    }

    // Two other ranks swap at random, without reaching the heaviest; then the heaviest looks again.
    bool shake() {
        if (num_ranks_ < 3) return false;
        while (steps_left_ > 0) {
            steps_left_ -= kStepsPerShake;
            const auto a = at(1 + dice_.below(num_ranks_ - 1)), b = at(1 + dice_.below(num_ranks_ - 1));
            if (a == b) continue;
            swap_at_random(a, b);
            bool swapped = false;
            for (const auto light : {a, b}) {
                swapped = swapped || swap(at(0), light, false) || swap(at(0), light, true);
            }
            if (!swapped) continue;
            sort_ranks();
            return true;
        }
        return false;
    }

    void swap_at_random(std::int32_t a, std::int32_t b) {
        const Movable &from = movable_[a], &to = movable_[b];
        if (from.size == 0) return;
        const std::int32_t give = from.places[dice_.below(from.size)];
        const std::int64_t limit = loads_[at(0)];
        std::array<std::int32_t, kMovable> takable;
        int num_takable = 0;
        for (int i = 0; i < to.size; ++i) {
            const std::int64_t change = weights_[give] - weights_[to.places[i]];
            if (loads_[a] - change < limit && loads_[b] + change < limit) takable[num_takable++] = to.places[i];
        }
        if (num_takable == 0) return;
        const std::int32_t take = takable[dice_.below(num_takable)];
        move({weights_[give], give}, a, b);
        move({weights_[take], take}, b, a);
    }

    // Brings two loads closer, if that makes the larger smaller.
    bool swap(std::int32_t heavy, std::int32_t light, bool with_pairs) {
        const std::int64_t room = loads_[heavy] - loads_[light];
        if (room < 2) return false;
        const bool may_take_nothing = !equal_counts_ || (!with_pairs && counts_[heavy] > counts_[light]);
        givable_.clear();
        takable_.assign(may_take_nothing, Bundle{});
        add_bundles(heavy, with_pairs, givable_);
        add_bundles(light, with_pairs, takable_);
        steps_left_ -= (with_pairs ? kStepsPerBundle : 1) * (std::ssize(givable_) + std::ssize(takable_));
        const std::int64_t enough = (target_ - loads_[heavy]) + (target_ - loads_[light]);
        const auto match = best_match(givable_, takable_, room, std::max<std::int64_t>(enough, 1));
        if (!match) return false;
        move(*match->give, heavy, light);
        move(*match->take, light, heavy);
        return true;
    }

    // What the rank can move at once, lightest first. Where counts must be equal, a pair goes for a pair.
    void add_bundles(std::int32_t rank, bool with_pairs, std::vector<Bundle>& bundles) const {
        const Movable& movable = movable_[rank];
        if (!with_pairs || !equal_counts_) {
            for (int i = 0; i < movable.size; ++i) bundles.push_back({weights_[movable.places[i]], movable.places[i]});
        }
        if (!with_pairs) return;
        for (int i = 0; i < std::min(movable.size, kPairable); ++i) {
            for (int j = 0; j < i; ++j) {
                const auto first = movable.places[i], second = movable.places[j];
                bundles.push_back({weights_[first] + weights_[second], first, second});
            }
        }
        std::stable_sort(bundles.begin(), bundles.end(), [](auto& a, auto& b) { return a.weight < b.weight; });
    }

    void move(const Bundle& bundle, std::int32_t from, std::int32_t to) {
        loads_[from] -= bundle.weight;
        loads_[to] += bundle.weight;
        for (const auto place : {bundle.first, bundle.second}) {
            if (place < 0) continue;
            movable_[from].erase(place);
            movable_[to].insert(place);
            --counts_[from];
            ++counts_[to];
            ranks_[place] = to;
        }
    }

    const Weights weights_;  // heaviest first
    const std::int64_t target_;
    const bool equal_counts_;
    std::int64_t steps_left_;
    std::vector<std::int32_t>& ranks_;  // of each place in the order of weights
    std::vector<std::int64_t>& loads_;
    const int num_ranks_;
    SortedItems order_;  // the ranks, heaviest first
    std::vector<std::int32_t> counts_;
    std::vector<Movable> movable_;
    std::vector<Bundle> givable_, takable_;
    Dice dice_;
};

}  // namespace

void swap_items(Weights descending, std::int64_t bound, bool equal_counts, std::int64_t num_steps,
                std::vector<std::int32_t>& ranks, std::vector<std::int64_t>& loads) {
    Swaps(descending, bound, equal_counts, num_steps, ranks, loads).run();
}

}  // namespace motet
