// A tournament over ranks whose root is the lightest rank; ties go to the one with fewer items, then the lower number.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace motet {

class Tournament {
public:
    explicit Tournament(const std::vector<std::int64_t>& loads)
        : num_leaves_(std::bit_ceil(loads.size())), keys_(2 * num_leaves_, ~Key{0}) {
        for (std::size_t rank = 0; rank < loads.size(); ++rank) {
            keys_[num_leaves_ + rank] = static_cast<Key>(loads[rank]) << 64 | rank;
        }
        for (std::size_t node = num_leaves_ - 1; node > 0; --node) keys_[node] = lower(keys_[2 * node], keys_[2 * node + 1]);
    }
    int lightest() const { return static_cast<int>(keys_[1] & 0xffffffff); }
    void add_to_lightest(std::int64_t weight) {
        Key winner = keys_[1] + (static_cast<Key>(weight) << 64 | Key{1} << 32);
        std::size_t node = num_leaves_ + lightest();
        keys_[node] = winner;
        for (; node > 1; node /= 2) keys_[node / 2] = winner = lower(winner, keys_[node ^ 1]);
    }

private:
    // Load, number of items added and rank in one integer: one comparison without a branch decides a game.
    using Key = unsigned __int128;
    static Key lower(Key a, Key b) { return b < a ? b : a; }

    std::size_t num_leaves_;
    std::vector<Key> keys_;
};

}  // namespace motet
