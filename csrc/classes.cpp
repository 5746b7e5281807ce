// Counts where the lengths are small numbers, which needs no sort; sorts where they are not.
#include "classes.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace motet {
namespace {

// Above as many different lengths as this, a table of counts is slower than a sort.
constexpr std::int64_t kLongestCounted = 1 << 18;

void count(Classes& classes, std::int64_t longest) {
    auto& table = classes.start_of_length;  // counts first
    table.assign(longest + 1, 0);
    for (const auto length : classes.of_items) ++table[length];
    classes.starts.push_back(0);
    for (std::int64_t length = longest; length >= 0; --length) {
        if (table[length] == 0) continue;
        const std::int32_t start = classes.starts.back();
        classes.starts.push_back(start + std::exchange(table[length], start));
        classes.lengths.push_back(length);
    }
}

void sort(Classes& classes) {
    const auto order = heaviest_first(classes.of_items);
    classes.of_item.resize(order.size());
    for (std::size_t position = 0; position < order.size(); ++position) {
        const std::int64_t length = classes.of_items[order[position]];
        if (position == 0 || length != classes.lengths.back()) {
            classes.lengths.push_back(length);
            classes.starts.push_back(static_cast<std::int32_t>(position));
        }
        classes.of_item[order[position]] = static_cast<std::int32_t>(classes.lengths.size() - 1);
    }
    classes.starts.push_back(static_cast<std::int32_t>(order.size()));
}

}  // namespace

Classes by_length(Weights lengths) {
    Classes classes{lengths, {}, {}, {}, {}};
    const std::int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    if (longest <= kLongestCounted) {
        count(classes, longest);
    } else {
        sort(classes);
    }
    return classes;
}

GroupedPlacement place(const Classes& classes, const std::vector<std::int32_t>& rank_of_position,
                       const std::vector<std::int64_t>& counts, std::vector<std::int64_t> loads, std::int64_t bound) {
    const std::size_t num_items = rank_of_position.size();
    std::vector<std::int32_t> ranks(num_items);
    std::vector<std::int64_t> items(num_items), offsets(counts.size() + 1, 0);
    std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
    std::vector<std::int32_t> next_place(offsets.begin(), offsets.end());
    // Each item takes the next position of its class, and the next place of that position's rank.
    const auto place_all = [&](std::vector<std::int32_t> next_position, const auto& key_of_item) {
        for (std::size_t item = 0; item < num_items; ++item) {
            const std::int32_t rank = rank_of_position[next_position[key_of_item[item]]++];
            ranks[item] = rank;
            items[next_place[rank]++] = static_cast<std::int64_t>(item);
        }
    };
    if (classes.of_item.empty()) {
        place_all(classes.start_of_length, classes.of_items);
    } else {
        place_all(classes.starts, classes.of_item);
    }
    return {std::move(ranks), std::move(items), std::move(offsets), std::move(loads), bound};
}

}  // namespace motet
