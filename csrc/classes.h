// Items by length: equal lengths make a class, and what is decided about lengths costs nothing per item.
#pragma once

#include <cstdint>
#include <vector>

#include "balance.h"

namespace motet {

// Items have positions: their places in the order by length, longest first, then by item number.
struct Classes {
    Weights of_items;                   // the lengths themselves, [num_items]
    std::vector<std::int64_t> lengths;  // [num_classes], descending
    std::vector<std::int32_t> starts;   // [num_classes + 1], the first position of each class
    std::vector<std::int32_t> of_item;  // the class of each item; empty where lengths are small enough to look it up
};

Classes by_length(Weights lengths);

// How many of a class a rank takes: those that come next by item number.
struct Take {
    std::int32_t rank, place, count;
};

struct GroupedPlacement {
    std::vector<std::int32_t> ranks;           // [num_items]
    std::vector<std::int64_t> items, offsets;  // [num_items] by rank, in item order; [num_ranks + 1]
    std::vector<std::int64_t> loads;           // [num_ranks]
    std::int64_t bound = 0;
};

// The takes must use every class up.
GroupedPlacement place(const Classes& classes, const std::vector<Take>& takes, std::vector<std::int64_t> loads,
                       std::int64_t bound);

// padded.cpp: minimise the largest count * (linear * longest + quadratic * longest^2), which must fit for all items; the
// bound is the optimum.
GroupedPlacement padded(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic);
std::int64_t padded_bound(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic);

}  // namespace motet
