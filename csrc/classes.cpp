// Counts where the lengths are small numbers, which needs no sort; sorts where they are not.
#include "classes.h"

#include <algorithm>
#include <numeric>

namespace motet {
namespace {

// Above as many different lengths as this, a table of counts is slower than a sort.
constexpr std::int64_t kLongestCounted = 1 << 18;

void count(Classes& classes, std::int64_t longest) {
    std::vector<std::int32_t> counts(longest + 1, 0);
    for (const auto length : classes.of_items) ++counts[length];
    classes.starts.push_back(0);
    for (std::int64_t length = longest; length >= 0; --length) {
        if (counts[length] == 0) continue;
        classes.starts.push_back(classes.starts.back() + counts[length]);
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

// Where the items of a class go: to the rank of one take after the other.
struct Cursor {
    std::int32_t rank = 0, left = 0, next = 0;  // next: the take after this one
};

// By class, in the order in which each class is taken; and where each class begins.
std::pair<std::vector<Take>, std::vector<Cursor>> by_class(const std::vector<Take>& takes, std::size_t num_classes) {
    std::vector<Cursor> cursors(num_classes + 1);
    for (const auto& take : takes) ++cursors[take.place + 1].next;
    for (std::size_t c = 0; c < num_classes; ++c) cursors[c + 1].next += cursors[c].next;
    std::vector<Take> sorted(takes.size());
    for (const auto& take : takes) sorted[cursors[take.place].next++] = take;
    for (std::size_t c = num_classes; c > 0; --c) cursors[c].next = cursors[c - 1].next;
    cursors[0].next = 0;
    return {std::move(sorted), std::move(cursors)};
}

}  // namespace

Classes by_length(Weights lengths) {
    Classes classes{lengths, {}, {}, {}};
    const std::int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    if (longest <= kLongestCounted) {
        count(classes, longest);
    } else {
        sort(classes);
    }
    return classes;
}

GroupedPlacement place(const Classes& classes, const std::vector<Take>& takes, std::vector<std::int64_t> loads,
                       std::int64_t bound) {
    const std::size_t num_items = classes.of_items.size();
    std::vector<std::int32_t> ranks(num_items);
    std::vector<std::int64_t> items(num_items), offsets(loads.size() + 1, 0);
    for (const auto& take : takes) offsets[take.rank + 1] += take.count;
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    std::vector<std::int32_t> next_place(offsets.begin(), offsets.end());
    auto [sorted, cursors] = by_class(takes, classes.lengths.size());
    const auto place_all = [&, &takes = sorted](std::vector<Cursor>& cursors, const auto& key_of_item) {
        for (std::size_t item = 0; item < num_items; ++item) {
            Cursor& cursor = cursors[key_of_item[item]];
            while (cursor.left == 0) {
                const Take& take = takes[cursor.next++];
                cursor.rank = take.rank;
                cursor.left = take.count;
            }
            --cursor.left;
            ranks[item] = cursor.rank;
            items[next_place[cursor.rank]++] = static_cast<std::int64_t>(item);
        }
    };
    if (num_items > 0 && classes.of_item.empty()) {
        std::vector<Cursor> of_length(classes.lengths[0] + 1);
        for (std::size_t c = 0; c < classes.lengths.size(); ++c) of_length[classes.lengths[c]] = cursors[c];
        place_all(of_length, classes.of_items);
    } else {
        place_all(cursors, classes.of_item);
    }
    return {std::move(ranks), std::move(items), std::move(offsets), std::move(loads), bound};
}

}  // namespace motet
