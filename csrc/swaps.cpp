// Swaps between heavy and light ranks; see src/motet/balance/reference/swaps.py.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>

#include "balance.h"
#include "changes.h"

namespace motet {
namespace {

constexpr int kMovable = 24;         // so many of a rank's items move, the lightest
constexpr int kPairable = 16;        // so many of these form pairs
constexpr int kPairRounds = 16;
constexpr int kStepsPerBundle = 8;   // a bundle is made and sorted before it is looked at
constexpr int kStepsPerShake = 16;

// One or two items of a rank that move together, by their places in the order of weights; second -1: one.
struct Bundle {
    std::int64_t weight = 0;
    std::int32_t first = -1, second = -1;
};

// Nothing, and then the items of a rank that can move, lightest first: their weights, and their places in the order of
// weights. Weights stand by themselves, as most pairs of ranks are done with when these have been looked at.
struct Movable {
    std::int32_t size = 0;
    std::array<std::int64_t, 1 + kMovable> weights{};
    std::array<std::int32_t, 1 + kMovable> places{-1};

    // first: 0 with nothing, 1 without.
    std::span<const std::int64_t> weights_from(std::int32_t first) const {
        return {weights.data() + first, static_cast<std::size_t>(1 + size - first)};
    }
    std::span<const Bundle> bundles_from(std::int32_t first, std::vector<Bundle>& bundles) const {
        bundles.clear();
        for (std::int32_t i = first; i <= size; ++i) bundles.push_back({weights[i], places[i], -1});
        return bundles;
    }

    void append(std::int64_t weight, std::int32_t place) {
        weights[++size] = weight;
        places[size] = place;
    }
    void insert(std::int64_t weight, std::int32_t place) {
        const auto at = find(place);
        if (at > kMovable) return;
        if (size < kMovable) ++size;  // else the heaviest is pushed out and stays where it is
        std::move_backward(weights.begin() + at, weights.begin() + size, weights.begin() + size + 1);
        std::move_backward(places.begin() + at, places.begin() + size, places.begin() + size + 1);
        weights[at] = weight;
        places[at] = place;
    }
    void erase(std::int32_t place) {
        const auto at = find(place);
        std::move(weights.begin() + at + 1, weights.begin() + size + 1, weights.begin() + at);
        std::move(places.begin() + at + 1, places.begin() + size + 1, places.begin() + at);
        --size;
    }

private:
    std::ptrdiff_t find(std::int32_t place) const {
        return std::lower_bound(places.begin() + 1, places.begin() + 1 + size, place, std::greater<>()) - places.begin();
    }
};

// Numbers that look random and are the same everywhere: a linear congruential generator, its high bits.
class RandomNumbers {
public:
    std::int32_t below(std::size_t limit) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::int32_t>((state_ >> 33) % limit);
    }

private:
    std::uint64_t state_ = 0;
};

struct Match {
    Bundle give, take;
};

// What to give and take so that two loads, `room` apart, come closest, or as close as `enough`; no match where each
// swap leaves one of them as heavy as the heavier was. Bundles are lightest first.
std::optional<Match> best_match(std::span<const Bundle> heavy, std::span<const Bundle> light, std::int64_t room,
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
                best = Match{give, take};
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
          num_ranks_(static_cast<int>(loads.size())),
          movable_(kept_movable()) {}

    void run() {
        sort_heaviest_first(loads_, order_);
        steps_left_ -= num_ranks_;
        if (loads_[at(0)] <= target_) return;
        find_movable();
        while (steps_left_ > 0 && loads_[at(0)] > target_) {
            if (!swap_in_rounds(false) && !swap_in_rounds(true) && !shake()) return;
        }
    }

private:
    // Kept from call to call: fresh memory of this size costs as much as the swaps.
    static std::vector<Movable>& kept_movable() {
        static thread_local std::vector<Movable> movable;
        return movable;
    }

    // The rank at a place in the order of loads, heaviest first; from the end: lightest first.
    std::int32_t at(int place) const { return order_.items[place]; }
    std::int32_t from_end(int place) const { return order_.items[num_ranks_ - 1 - place]; }

    // Few ranks have other loads than when they were sorted: the others are in their order.
    void sort_ranks() {
        steps_left_ -= num_ranks_;
        const auto heavier = [&](std::int32_t a, std::int32_t b) {
            return loads_[a] != loads_[b] ? loads_[a] > loads_[b] : a < b;
        };
        std::sort(changed_.begin(), changed_.end(), heavier);
        const auto left = std::remove_if(order_.items.begin(), order_.items.end(),
                                         [&](std::int32_t rank) { return is_changed_[rank]; });
        sorted_.resize(order_.items.size());
        std::merge(order_.items.begin(), left, changed_.begin(), changed_.end(), sorted_.begin(), heavier);
        order_.items.swap(sorted_);
        for (const auto rank : changed_) is_changed_[rank] = false;
        changed_.clear();
    }

    void find_movable() {
        counts_.assign(num_ranks_, 0);
        is_changed_.assign(num_ranks_, false);
        movable_.resize(std::max(movable_.size(), loads_.size()));
        for (int rank = 0; rank < num_ranks_; ++rank) movable_[rank].size = 0;
        for (auto place = static_cast<std::int32_t>(ranks_.size()); place-- > 0;) {
            ++counts_[ranks_[place]];
            Movable& movable = movable_[ranks_[place]];
            const bool third = movable.size > 1 && movable.weights[movable.size - 1] == weights_[place];
            if (movable.size < kMovable && !third) movable.append(weights_[place], place);
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
            const auto a = at(1 + random_.below(num_ranks_ - 1)), b = at(1 + random_.below(num_ranks_ - 1));
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
        const auto givable = movable_[a].bundles_from(1, givable_);
        if (givable.empty()) return;
        const Bundle give = givable[random_.below(givable.size())];
        const std::int64_t limit = loads_[at(0)];
        movable_[b].bundles_from(1, takable_);
        std::erase_if(takable_, [&](const Bundle& take) {
            const std::int64_t change = give.weight - take.weight;
            return loads_[a] - change >= limit || loads_[b] + change >= limit;
        });
        if (!takable_.empty()) exchange(a, b, give, takable_[random_.below(takable_.size())]);
    }

    // Brings two loads closer, if that makes the larger smaller.
    bool swap(std::int32_t heavy, std::int32_t light, bool with_pairs) {
        const std::int64_t room = loads_[heavy] - loads_[light];
        if (room < 2) return false;
        // Where counts must be equal, an item goes for an item and a pair for a pair.
        const int first = equal_counts_ && (with_pairs || counts_[heavy] <= counts_[light]) ? 1 : 0;
        if (!with_pairs) {
            const auto given = movable_[heavy].weights_from(1), taken = movable_[light].weights_from(first);
            steps_left_ -= std::ssize(given) + std::ssize(taken);
            if (!any_brings_closer(given, taken, room)) return false;
        }
        std::span<const Bundle> givable = movable_[heavy].bundles_from(1, givable_);
        std::span<const Bundle> takable = movable_[light].bundles_from(first, takable_);
        if (with_pairs) {
            givable = add_pairs(givable_);
            takable = add_pairs(takable_);
            steps_left_ -= kStepsPerBundle * (std::ssize(givable) + std::ssize(takable));
        }
        const std::int64_t enough = (target_ - loads_[heavy]) + (target_ - loads_[light]);
        const auto match = best_match(givable, takable, room, std::max<std::int64_t>(enough, 1));
        if (match) exchange(heavy, light, match->give, match->take);
        return match.has_value();
    }

    // Pairs of the bundles, which are single; with these, unless counts must be equal.
    std::span<const Bundle> add_pairs(std::vector<Bundle>& bundles) {
        singles_ = bundles;
        if (equal_counts_) bundles.clear();
        std::span<const Bundle> singles = singles_;
        if (!singles.empty() && singles[0].first < 0) singles = singles.subspan(1);
        singles = singles.first(std::min<std::size_t>(singles.size(), kPairable));
        for (std::size_t i = 0; i < singles.size(); ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                bundles.push_back({singles[i].weight + singles[j].weight, singles[i].first, singles[j].first});
            }
        }
        std::stable_sort(bundles.begin(), bundles.end(), [](auto& a, auto& b) { return a.weight < b.weight; });
        return bundles;
    }

    void exchange(std::int32_t a, std::int32_t b, const Bundle& from_a, const Bundle& from_b) {
        loads_[a] += from_b.weight - from_a.weight;
        loads_[b] += from_a.weight - from_b.weight;
        for (const auto rank : {a, b}) {
            if (!is_changed_[rank]) changed_.push_back(rank);
            is_changed_[rank] = true;
        }
        take_out(a, from_a);  // both before anything is put in, which can push the heaviest out of what can move
        take_out(b, from_b);
        put_in(a, from_b);
        put_in(b, from_a);
    }

    void take_out(std::int32_t rank, const Bundle& bundle) {
        for (const auto place : {bundle.first, bundle.second}) {
            if (place < 0) continue;
            movable_[rank].erase(place);
            --counts_[rank];
        }
    }

    void put_in(std::int32_t rank, const Bundle& bundle) {
        for (const auto place : {bundle.first, bundle.second}) {
            if (place < 0) continue;
            movable_[rank].insert(weights_[place], place);
            ++counts_[rank];
            ranks_[place] = rank;
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
    std::vector<std::int32_t> changed_, sorted_;  // the ranks with other loads since; room for the next order
    std::vector<char> is_changed_;
    std::vector<std::int32_t> counts_;
    std::vector<Movable>& movable_;
    std::vector<Bundle> givable_, takable_, singles_;
    RandomNumbers random_;
};

}  // namespace

void swap_items(Weights descending, std::int64_t bound, bool equal_counts, std::int64_t num_steps,
                std::vector<std::int32_t>& ranks, std::vector<std::int64_t>& loads) {
    Swaps(descending, bound, equal_counts, num_steps, ranks, loads).run();
}

}  // namespace motet
