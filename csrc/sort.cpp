// Radix sort: some 20 times faster than a comparison sort on a few thousand lengths, and stable by nature.
#include <algorithm>
#include <bit>
#include <utility>

#include "balance.h"

namespace motet {
namespace {

// Sorts keys of (longest - weight, item), the item in the low bits: one integer to move, and nothing to look up.
template <class Key>
void sort_keys(Weights weights, std::int64_t longest, int weight_bits, SortedItems& sorted) {
    const std::size_t num_items = weights.size();
    const int item_bits = std::bit_width(num_items - 1);
    // No more counters than items, and than the fastest cache holds.
    const int most_digit_bits = std::clamp(item_bits, 6, 12);
    const int num_digits = std::max(1, (weight_bits + most_digit_bits - 1) / most_digit_bits);
    const int digit_bits = (weight_bits + num_digits - 1) / num_digits;
    const std::size_t num_values = std::size_t{1} << digit_bits;
    const auto value = [&](std::uint64_t inverted, int digit) {
        return digit * num_values + ((inverted >> (digit * digit_bits)) & (num_values - 1));
    };
    const auto inverted = [&](std::size_t item) { return static_cast<std::uint64_t>(longest - weights[item]); };

    std::vector<std::uint32_t> next(num_digits * num_values, 0);
    for (int digit = 0; digit < num_digits; ++digit) {
        for (std::size_t item = 0; item < num_items; ++item) ++next[value(inverted(item), digit)];
        std::uint32_t before = 0;
        for (std::size_t i = digit * num_values; i < (digit + 1) * num_values; ++i) {
            before += std::exchange(next[i], before);
        }
    }
    // Kept from call to call: fresh memory of this size costs more than the sort.
    static thread_local std::vector<Key> buffers[2];
    for (auto& buffer : buffers) buffer.resize(std::max(buffer.size(), num_items));
    Key *keys = buffers[0].data(), *moved = buffers[1].data();
    for (std::size_t item = 0; item < num_items; ++item) {
        keys[next[value(inverted(item), 0)]++] = static_cast<Key>(inverted(item)) << item_bits | item;
    }
    for (int digit = 1; digit < num_digits; ++digit) {
        for (std::size_t place = 0; place < num_items; ++place) {
            moved[next[value(static_cast<std::uint64_t>(keys[place] >> item_bits), digit)]++] = keys[place];
        }
        std::swap(keys, moved);
    }
    std::int32_t* const items = sorted.items.data();
    std::int64_t* const sorted_weights = sorted.weights.data();
    const Key item_mask = (Key{1} << item_bits) - 1;
    for (std::size_t place = 0; place < num_items; ++place) {
        items[place] = static_cast<std::int32_t>(keys[place] & item_mask);
        sorted_weights[place] = longest - static_cast<std::int64_t>(keys[place] >> item_bits);
    }
}

}  // namespace

void sort_heaviest_first(Weights weights, SortedItems& sorted) {
    sorted.items.resize(weights.size());
    sorted.weights.resize(weights.size());
    if (weights.empty()) return;
    std::int64_t shortest = weights[0], longest = weights[0];
    for (const auto weight : weights) {
        shortest = std::min(shortest, weight);
        longest = std::max(longest, weight);
    }
    const int weight_bits = std::bit_width(static_cast<std::uint64_t>(longest - shortest));
    if (std::bit_width(weights.size() - 1) + weight_bits <= 64) {
        sort_keys<std::uint64_t>(weights, longest, weight_bits, sorted);
    } else {
        sort_keys<unsigned __int128>(weights, longest, weight_bits, sorted);
    }
}

std::vector<std::int32_t> heaviest_first(Weights weights) {
    SortedItems sorted;
    sort_heaviest_first(weights, sorted);
    return std::move(sorted.items);
}

}  // namespace motet
