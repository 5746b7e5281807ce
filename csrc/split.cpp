// Fit, or fill and carry on with the rest; see src/motet/balance/reference/splitting.py.
#include "split.h"

#include <algorithm>
#include <queue>
#include <tuple>

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
        pieces_.resize(given.units.size());
    }

    void run() {
        std::vector<Waiting> waiting(given_.units.size());
        for (std::size_t item = 0; item < waiting.size(); ++item) {
            const int phase = static_cast<int>(given_.phases[item]);
            waiting[item] = {given_.turns[item], cost(item, phase), static_cast<std::int32_t>(item)};
        }
        std::priority_queue<Waiting> queue({}, std::move(waiting));
        while (!queue.empty()) {
            Waiting next = queue.top();
            queue.pop();
            const auto item = next.item;
            const int phase = static_cast<int>(given_.phases[item]);
            const std::int64_t num_units = given_.units[item];
            const std::int64_t begin = pieces_[item].empty() ? 0 : pieces_[item].back().end;
            for (int each = 0; each < num_phases_; ++each) before_[each] = share(item, each, begin);
            int rank = tightest_fit(item, phase, begin > 0);
            std::int64_t end = num_units;
            if (rank < 0) {
                if (static_cast<std::int64_t>(pieces_[item].size()) + 1 >= given_.parts[item]) continue;
                std::tie(rank, end) = widest_reach(item);
                if (end <= begin) continue;
            }
            put(item, {begin, end, rank});
            if (end == num_units) continue;
            next.left = cost(item, phase) - share(item, phase, end);
            queue.push(next);
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
    std::int64_t& room(int rank, int phase) { return rooms_[rank * num_phases_ + phase]; }

    std::int64_t share(int item, int phase, std::int64_t end) const {
        if (end == given_.units[item]) return cost(item, phase);
        return static_cast<std::int64_t>(static_cast<Wide>(cost(item, phase)) * end / given_.units[item]);
    }

    bool is_on(int item, int rank) const {
        return std::ranges::any_of(pieces_[item], [&](const Piece& piece) { return piece.rank == rank; });
    }

    // The rank with the least room in `own_phase` that holds the rest of the item, or -1.
    int tightest_fit(int item, int own_phase, bool is_cut) {
        int best = -1;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            if (best >= 0 && room(rank, own_phase) >= room(best, own_phase)) continue;
            bool fits = true;
            for (int phase = 0; fits && phase < num_phases_; ++phase) {
                const auto rest = cost(item, phase) - before_[phase] + (is_cut ? overhead(item, phase) : 0);
                fits = room(rank, phase) >= rest;
            }
            if (fits && !(is_cut && is_on(item, rank))) best = rank;
        }
        return best;
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
        for (int phase = 0; phase < num_phases_; ++phase) {
            room(piece.rank, phase) -=
                share(item, phase, piece.end) - before_[phase] + (is_cut ? overhead(item, phase) : 0);
        }
        pieces_[item].push_back(piece);
    }

    const Divisible& given_;
    int num_ranks_, num_phases_;
    std::vector<std::int64_t> rooms_;   // [num_ranks, num_phases]
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
