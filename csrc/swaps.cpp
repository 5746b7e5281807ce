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
constexpr int kAhead = 4;            // pairs of ranks ahead whose items are fetched while others are compared
constexpr int kFewChanged = 8;       // of so many ranks one may have changed for their order to be mended, not made

// One or two items of a rank that move together, by their places in the order of weights; second -1: one.
struct Bundle {
    std::int64_t weight = 0;
    std::int32_t first = -1, second = -1;
};

// Nothing, and then the items of a rank that can move, lightest first.
struct Movable {
    std::array<std::int64_t, 1 + kMovable> weights;
    std::array<std::int32_t, 1 + kMovable> places;
    std::int32_t size = 0;

    Bundle at(std::size_t index) const { return {weights[index], places[index]}; }
    void clear() {
        size = 0;
        weights[0] = 0;
        places[0] = -1;
    }
    void append(std::int64_t weight, std::int32_t place) {
        weights[++size] = weight;
        places[size] = place;
    }
    void insert(std::int64_t weight, std::int32_t place) {
        const auto index = find(place);
        if (index > kMovable) return;
        if (size < kMovable) ++size;  // else the heaviest is pushed out and stays where it is
        std::move_backward(weights.begin() + index, weights.begin() + size, weights.begin() + size + 1);
        std::move_backward(places.begin() + index, places.begin() + size, places.begin() + size + 1);
        weights[index] = weight;
        places[index] = place;
    }
    void erase(std::int32_t place) {
        const auto index = find(place);
        std::move(weights.begin() + index + 1, weights.begin() + size + 1, weights.begin() + index);
        std::move(places.begin() + index + 1, places.begin() + size + 1, places.begin() + index);
        --size;
    }

private:
    // Where a place in the order of weights stands, or would: heavier ones have lower places.
    std::ptrdiff_t find(std::int32_t place) const {
        const auto first = places.begin() + 1;
        return std::lower_bound(first, first + size, place, std::greater<>()) - places.begin();
    }
};

// Some items of a rank that can move, all of one kind: the first is nothing, or the lightest.
struct Items {
    const Movable* movable;
    std::size_t first, count;

    std::size_t size() const { return count; }
    std::span<const std::int64_t> weights() const { return {movable->weights.data() + first, count}; }
    Bundle operator[](std::size_t index) const { return movable->at(first + index); }
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
template <class Bundles>
std::optional<Match> best_match(const Bundles& heavy, const Bundles& light, std::int64_t room, std::int64_t enough) {
    std::int64_t smallest_miss = room;
    std::optional<Match> best;
    std::size_t place = 0;  // the lightest with which at most half the room moves; with the one before it, more moves
    for (std::size_t index = 0; index < heavy.size(); ++index) {
        const Bundle give = heavy[index];
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
          target_(slightly_above(bound, 17)),
          equal_counts_(equal_counts),
          steps_left_(num_steps),
          ranks_(ranks),
          loads_(loads),
          num_ranks_(static_cast<int>(loads.size())),
          is_changed_(loads.size(), false),
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
        if (order_.items.empty() || changed_.size() * kFewChanged > loads_.size()) {
            sort_heaviest_first(loads_, order_);
        } else {
            mend_order();
        }
        for (const auto rank : changed_) is_changed_[rank] = false;
        changed_.clear();
        steps_left_ -= num_ranks_;
    }

    // Those whose loads changed are taken out of the order, and merged with the others.
    void mend_order() {
        const auto comes_before = [&](std::int32_t a, std::int32_t b) {
            return loads_[a] != loads_[b] ? loads_[a] > loads_[b] : a < b;
        };
        std::sort(changed_.begin(), changed_.end(), comes_before);
        mended_.items.clear();
        mended_.weights.clear();
        auto next = changed_.begin();
        const auto put = [&](std::int32_t rank, std::int64_t load) {
            mended_.items.push_back(rank);
            mended_.weights.push_back(load);
        };
        for (int place = 0; place < num_ranks_; ++place) {
            const std::int32_t rank = order_.items[place];
            if (is_changed_[rank]) continue;
            for (; next != changed_.end() && comes_before(*next, rank); ++next) put(*next, loads_[*next]);
            put(rank, order_.weights[place]);
        }
        for (; next != changed_.end(); ++next) put(*next, loads_[*next]);
        std::swap(order_, mended_);
    }

    void find_movable() {
        counts_.assign(num_ranks_, 0);
        movable_.resize(std::max(movable_.size(), loads_.size()));
        for (int rank = 0; rank < num_ranks_; ++rank) movable_[rank].clear();
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
                if (place + kAhead < num_ranks_ - shift) {
                    __builtin_prefetch(&movable_[at(place + kAhead)]);
                    __builtin_prefetch(&movable_[from_end(place + kAhead + shift)]);
                }
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
        const Movable &givable = movable_[a], &takable = movable_[b];
        if (givable.size == 0) return;
        const Bundle give = givable.at(1 + random_.below(givable.size));
        const std::int64_t limit = loads_[at(0)];
        takable_.clear();
        for (std::int32_t index = 1; index <= takable.size; ++index) {
            const Bundle take = takable.at(index);
            const std::int64_t change = give.weight - take.weight;
            if (loads_[a] - change < limit && loads_[b] + change < limit) takable_.push_back(take);
        }
        if (!takable_.empty()) exchange(a, b, give, takable_[random_.below(takable_.size())]);
    }

    // Brings two loads closer, if that makes the larger smaller.
    bool swap(std::int32_t heavy, std::int32_t light, bool with_pairs) {
        const std::int64_t room = loads_[heavy] - loads_[light];
        if (room < 2) return false;
        // Where counts must be equal, an item goes for an item and a pair for a pair.
        const bool may_take_nothing = !equal_counts_ || (!with_pairs && counts_[heavy] > counts_[light]);
        const Items givable = items_of(heavy, false), takable = items_of(light, may_take_nothing);
        const std::int64_t enough =
            std::max<std::int64_t>((target_ - loads_[heavy]) + (target_ - loads_[light]), 1);
        std::optional<Match> match;
        if (with_pairs) {
            add_pairs(givable, givable_);
            add_pairs(takable, takable_);
            steps_left_ -= kStepsPerBundle * (std::ssize(givable_) + std::ssize(takable_));
            match = best_match(givable_, takable_, room, enough);
        } else {
            steps_left_ -= static_cast<std::int64_t>(givable.count + takable.count);
            // Of some thirty pairs of ranks one has a match.
            if (!any_brings_closer(givable.weights(), takable.weights(), room)) return false;
            match = best_match(givable, takable, room, enough);
        }
        if (match) exchange(heavy, light, match->give, match->take);
        return match.has_value();
    }

    // The items of a rank that can move; with_nothing: and nothing, before them.
    Items items_of(std::int32_t rank, bool with_nothing) const {
        const Movable& movable = movable_[rank];
        return {&movable, with_nothing ? std::size_t{0} : std::size_t{1},
                static_cast<std::size_t>(movable.size) + with_nothing};
    }

    void add_pairs(const Items& singles, std::vector<Bundle>& bundles) const {
        bundles.clear();
        for (std::size_t i = 0; !equal_counts_ && i < singles.count; ++i) bundles.push_back(singles[i]);
        const std::size_t first = singles.first == 0 ? 1 : 0;  // behind nothing
        const std::size_t end = std::min<std::size_t>(singles.count, first + kPairable);
        for (std::size_t i = first; i < end; ++i) {
            for (std::size_t j = first; j < i; ++j) {
                const Bundle one = singles[i], other = singles[j];
                bundles.push_back({one.weight + other.weight, one.first, other.first});
            }
        }
        if (bundles.size() < 2) return;
        std::stable_sort(bundles.begin(), bundles.end(), [](auto& a, auto& b) { return a.weight < b.weight; });
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
    SortedItems order_, mended_;        // the ranks, heaviest first; and room to work in
    std::vector<std::int32_t> changed_;  // ranks whose loads are others than in that order
    std::vector<char> is_changed_;
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
