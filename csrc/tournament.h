// A tournament over ranks, of which the one with the smallest key wins.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace motet {

// Each inner node keeps the loser of its match: when the winner's key grows, the way from its leaf to the root holds all
// that it has to play again.
template <class Key>
class Smallest {
public:
    explicit Smallest(const std::vector<Key>& keys) : losers_(keys.size()) {
        std::vector<Key> winners(keys.size());
        winners.insert(winners.end(), keys.begin(), keys.end());
        for (std::size_t node = keys.size() - 1; node > 0; --node) {
            winners[node] = std::min(winners[2 * node], winners[2 * node + 1]);
            losers_[node] = std::max(winners[2 * node], winners[2 * node + 1]);
        }
        winner_ = winners[1];
    }
    Key key() const { return winner_; }
    void grow(std::size_t rank, Key key) {
        for (std::size_t node = (losers_.size() + rank) / 2; node > 0; node /= 2) {
            const Key other = losers_[node], smaller = std::min(other, key);
            losers_[node] = other ^ key ^ smaller;  // the larger; a branch here would be guessed wrong half the time
            key = smaller;
        }
        winner_ = key;
    }

private:
    std::vector<Key> losers_;
    Key winner_;
};

// Gives each weight, in their order, to the lightest rank; ties go to the one that was given fewer, then to the lower
// number. loads: what ranks have before. place(i, rank): weight i goes to the rank.
template <class Key, class Place>
void give_to_lightest(std::span<const std::int64_t> weights, std::span<const std::int64_t> loads, int count_bits,
                      const Place& place) {
    const int rank_bits = std::bit_width(loads.size() - 1);
    std::vector<Key> keys;
    for (const auto load : loads) keys.push_back(static_cast<Key>(load) << (count_bits + rank_bits) | keys.size());
    Smallest<Key> smallest(keys);
    for (std::size_t i = 0; i < weights.size(); ++i) {
        const Key key = smallest.key();
        const auto rank = static_cast<std::size_t>(key & ((Key{1} << rank_bits) - 1));
        place(i, static_cast<int>(rank));
        smallest.grow(rank, key + (static_cast<Key>(weights[i]) << (count_bits + rank_bits)) + (Key{1} << rank_bits));
    }
}

template <class Place>
void give_to_lightest(std::span<const std::int64_t> weights, std::span<const std::int64_t> loads, const Place& place) {
    if (weights.empty()) return;
    // The rank that is chosen is at most at the mean, so that no load passes mean + longest, or what one has before.
    const auto sum = [](std::span<const std::int64_t> values) {
        return static_cast<std::uint64_t>(std::accumulate(values.begin(), values.end(), std::int64_t{0}));
    };
    const auto longest = static_cast<std::uint64_t>(*std::max_element(weights.begin(), weights.end()));
    const std::uint64_t most = (sum(weights) + sum(loads)) / loads.size() + 1 + longest;
    const auto before = static_cast<std::uint64_t>(*std::max_element(loads.begin(), loads.end()));
    const int count_bits = std::bit_width(weights.size()), load_bits = std::bit_width(std::max(most, before));
    if (std::bit_width(loads.size() - 1) + count_bits + load_bits <= 64) {
        give_to_lightest<std::uint64_t>(weights, loads, count_bits, place);
    } else {
        give_to_lightest<unsigned __int128>(weights, loads, count_bits, place);
    }
}

}  // namespace motet
