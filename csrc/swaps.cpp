// Swaps between heavy and light ranks; see src/motet/balance/reference/swaps.py.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <span>

#include "balance.h"

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

// Nothing, and then the items of a rank that can move, lightest first.
struct Movable {
    std::int32_t size = 0;
    std::array<Bundle, 1 + kMovable> bundles;

    std::span<const Bundle> items() const { return {bundles.data() + 1, static_cast<std::size_t>(size)}; }
    std::span<const Bundle> items_and_nothing() const { return {bundles.data(), static_cast<std::size_t>(size) + 1}; }

    void append(const Bundle& item) { bundles[++size] = item; }
    void insert(const Bundle& item) {
        auto* const at = find(item);
        if (at == bundles.data() + 1 + kMovable) return;
        if (size < kMovable) ++size;  // else the heaviest is pushed out and stays where it is
        std::move_backward(at, bundles.data() + size, bundles.data() + size + 1);
        *at = item;
    }
    void erase(const Bundle& item) {
        auto* const at = find(item);
        std::move(at + 1, bundles.data() + size + 1, at);
        --size;
    }

private:
    Bundle* find(const Bundle& item) {
        const auto lighter = [](const Bundle& a, const Bundle& b) { return a.first > b.first; };
        return std::lower_bound(bundles.data() + 1, bundles.data() + 1 + size, item, lighter);
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
        sort_ranks();
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

    void sort_ranks() {
        sort_heaviest_first(loads_, order_);
        steps_left_ -= num_ranks_;
    }

    void find_movable() {
        counts_.assign(num_ranks_, 0);
        movable_.resize(std::max(movable_.size(), loads_.size()));
        for (int rank = 0; rank < num_ranks_; ++rank) movable_[rank].size = 0;
        for (auto place = static_cast<std::int32_t>(ranks_.size()); place-- > 0;) {
            ++counts_[ranks_[place]];
            Movable& movable = movable_[ranks_[place]];
            const bool third = movable.size > 1 && movable.bundles[movable.size - 1].weight == weights_[place];
            if (movable.size < kMovable && !third) movable.append({weights_[place], place});
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
        const auto givable = movable_[a].items();
        if (givable.empty()) return;
        const Bundle give = givable[random_.below(givable.size())];
        const std::int64_t limit = loads_[at(0)];
        takable_.clear();
        for (const Bundle& take : movable_[b].items()) {
            const std::int64_t change = give.weight - take.weight;
            if (loads_[a] - change < limit && loads_[b] + change < limit) takable_.push_back(take);
        }
        if (!takable_.empty()) exchange(a, b, give, takable_[random_.below(takable_.size())]);
    }

    // Brings two loads closer, if that makes the larger smaller.
    bool swap(std::int32_t heavy, std::int32_t light, bool with_pairs) {
        const std::int64_t room = loads_[heavy] - loads_[light];
        if (room < 2) return false;
        std::span<const Bundle> givable = movable_[heavy].items();
        // Where counts must be equal, an item goes for an item and a pair for a pair.
        const bool may_take_nothing = !equal_counts_ || (!with_pairs && counts_[heavy] > counts_[light]);
        std::span<const Bundle> takable =
            may_take_nothing ? movable_[light].items_and_nothing() : movable_[light].items();
        if (with_pairs) {
            givable = add_pairs(givable, givable_);
            takable = add_pairs(takable, takable_);
        }
        steps_left_ -= (with_pairs ? kStepsPerBundle : 1) * (std::ssize(givable) + std::ssize(takable));
        const std::int64_t enough = (target_ - loads_[heavy]) + (target_ - loads_[light]);
        const auto match = best_match(givable, takable, room, std::max<std::int64_t>(enough, 1));
        if (match) exchange(heavy, light, match->give, match->take);
        return match.has_value();
    }

    std::span<const Bundle> add_pairs(std::span<const Bundle> singles, std::vector<Bundle>& bundles) const {
        bundles.clear();
        if (!equal_counts_) bundles.assign(singles.begin(), singles.end());
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
        take_out(a, from_a);  // both before anything is put in, which can push the heaviest out of what can move
        take_out(b, from_b);
        put_in(a, from_b);
        put_in(b, from_a);
    }

    void take_out(std::int32_t rank, const Bundle& bundle) {
        for (const auto place : {bundle.first, bundle.second}) {
            if (place < 0) continue;
            movable_[rank].erase({weights_[place], place});
            --counts_[rank];
        }
    }

    void put_in(std::int32_t rank, const Bundle& bundle) {
        for (const auto place : {bundle.first, bundle.second}) {
            if (place < 0) continue;
            movable_[rank].insert({weights_[place], place});
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
    std::vector<std::int32_t> counts_;
    std::vector<Movable>& movable_;
    std::vector<Bundle> givable_, takable_;
    RandomNumbers random_;
};

}  // namespace

void swap_items(Weights descending, std::int64_t bound, bool equal_counts, std::int64_t num_steps,
                std::vector<std::int32_t>& ranks, std::vector<std::int64_t>& loads) {
    Swaps(descending, bound, equal_counts, num_steps, ranks, loads).run();
}

}  // namespace motet
