// Fit, or fill and carry on with the rest; see src/motet/balance/reference/splitting.py.
#include "split.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

namespace motet {
namespace {

__extension__ typedef __int128 Wide;

struct Piece {
    std::int64_t begin, end;
    std::int32_t rank;
};

struct Waiting {
    std::int64_t turn, left;  // left: what is still to be placed, in the item's own phase
    std::int32_t item;
    bool operator<(const Waiting& other) const {  // the top of a priority queue is the greatest
        return std::tie(other.turn, left, other.item) < std::tie(turn, other.left, item);
    }
};

class Pouring {
public:
    Pouring(const Divisible& given, std::span<const std::int64_t> limits, int num_ranks)
        : given_(given), num_ranks_(num_ranks), num_phases_(given.num_phases), before_(limits.size()) {
        for (int rank = 0; rank < num_ranks; ++rank) rooms_.insert(rooms_.end(), limits.begin(), limits.end());
        least_room_first_.resize(num_ranks);
        std::iota(least_room_first_.begin(), least_room_first_.end(), 0);
        pieces_.resize(given.units.size());
    }

    void run() {
        std::vector<Waiting> waiting(given_.units.size());
        for (std::size_t item = 0; item < waiting.size(); ++item) {
            const int number = static_cast<int>(item);
            waiting[item] = {given_.turns[item], cost(number, phase_of(number)), number};
        }
        std::priority_queue<Waiting> queue({}, std::move(waiting));
        while (!queue.empty()) {
            Waiting next = queue.top();
            queue.pop();
            next.left = place(next.item);
            if (next.left > 0) queue.push(next);
        }
    }

    Pieces pieces() const {
        Pieces result;
        for (std::size_t item = 0; item < pieces_.size(); ++item) {
            for (const Piece& piece : pieces_[item]) {
                result.items.push_back(static_cast<std::int64_t>(item));
                result.begins.push_back(piece.begin);
                result.ends.push_back(piece.end);
                result.ranks.push_back(piece.rank);
            }
        }
        return result;
    }

private:
    std::int64_t cost(int item, int phase) const { return given_.costs[item * num_phases_ + phase]; }
    std::int64_t overhead(int item, int phase) const { return given_.overheads[item * num_phases_ + phase]; }
    int phase_of(int item) const { return static_cast<int>(given_.phases[item]); }
    std::int64_t& room(int rank, int phase) { return rooms_[rank * num_phases_ + phase]; }

    std::int64_t share(int item, int phase, std::int64_t end) const {
        if (end == given_.units[item]) return cost(item, phase);
        return static_cast<std::int64_t>(static_cast<Wide>(cost(item, phase)) * end / given_.units[item]);
    }

    bool is_on(int item, int rank) const {
        return std::ranges::any_of(pieces_[item], [&](const Piece& piece) { return piece.rank == rank; });
    }

    // Places what is left of an item, or a part of it; gives what is still left, 0 also where the item is given up.
    std::int64_t place(int item) {
        const std::int64_t begin = pieces_[item].empty() ? 0 : pieces_[item].back().end;
        for (int phase = 0; phase < num_phases_; ++phase) before_[phase] = share(item, phase, begin);
        sort_ranks(phase_of(item));
        int rank = tightest_fit(item, begin > 0);
        std::int64_t end = given_.units[item];
        if (rank < 0) {
            if (static_cast<std::int64_t>(pieces_[item].size()) + 1 >= given_.parts[item]) return 0;
            std::tie(rank, end) = widest_reach(item);
            if (end <= begin) return 0;
        }
        put(item, {begin, end, rank});
        return cost(item, phase_of(item)) - share(item, phase_of(item), end);
    }

    bool has_less_room(int a, int b) {
        return std::make_pair(room(a, sorted_phase_), a) < std::make_pair(room(b, sorted_phase_), b);
    }

    void sort_ranks(int phase) {
        if (phase == sorted_phase_) return;
        sorted_phase_ = phase;
        std::ranges::sort(least_room_first_, [&](int a, int b) { return has_less_room(a, b); });
    }

    auto place_of(int rank) {
        return std::ranges::lower_bound(least_room_first_, rank, [&](int a, int b) { return has_less_room(a, b); });
    }

    // The rank with the least room in the item's own phase that holds what is left of it, or -1.
    int tightest_fit(int item, bool is_cut) {
        const auto left = [&](int phase) {
            return cost(item, phase) - before_[phase] + (is_cut ? overhead(item, phase) : 0);
        };
        auto at = std::ranges::lower_bound(least_room_first_, left(sorted_phase_), {},
                                           [&](int rank) { return room(rank, sorted_phase_); });
        for (; at != least_room_first_.end(); ++at) {
            bool fits = !(is_cut && is_on(item, *at));
            for (int phase = 0; fits && phase < num_phases_; ++phase) fits = room(*at, phase) >= left(phase);
            if (fits) return *at;
        }
        return -1;
    }

    // The rank without a part of the item that can take the most of it, and up to where; the units before are placed.
    std::pair<int, std::int64_t> widest_reach(int item) {
        const std::int64_t num_units = given_.units[item];
        std::pair<int, std::int64_t> best{0, -1};
        for (int rank = 0; rank < num_ranks_; ++rank) {
            std::int64_t end = num_units;
            for (int phase = 0; phase < num_phases_; ++phase) {
                const Wide upto = static_cast<Wide>(room(rank, phase)) - overhead(item, phase) + before_[phase];
                if (upto >= cost(item, phase)) continue;
                const Wide reach = upto < 0 ? -1 : ((upto + 1) * num_units - 1) / cost(item, phase);
                end = std::min(end, static_cast<std::int64_t>(reach));
            }
            if (end > best.second && !is_on(item, rank)) best = {rank, end};
        }
        return best;
    }

    void put(int item, const Piece& piece) {
        const bool is_cut = piece.end - piece.begin < given_.units[item];
        least_room_first_.erase(place_of(piece.rank));
        for (int phase = 0; phase < num_phases_; ++phase) {
            room(piece.rank, phase) -=
                share(item, phase, piece.end) - before_[phase] + (is_cut ? overhead(item, phase) : 0);
        }
        least_room_first_.insert(place_of(piece.rank), piece.rank);
        pieces_[item].push_back(piece);
    }

    const Divisible& given_;
    int num_ranks_, num_phases_;
    std::vector<std::int64_t> rooms_;   // [num_ranks, num_phases]
    std::vector<int> least_room_first_;  // ranks by their room in sorted_phase_, then by number
    int sorted_phase_ = -1;
    std::vector<std::int64_t> before_;  // [num_phases]: what the placed units of the item in hand cost
    std::vector<std::vector<Piece>> pieces_;
};

}  // namespace

Pieces pour(const Divisible& given, std::span<const std::int64_t> limits, int num_ranks) {
    Pouring pouring(given, limits, num_ranks);
    pouring.run();
    return pouring.pieces();
}

}  // namespace motet
