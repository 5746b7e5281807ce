// The optimum of count times longest; see src/motet/balance/reference/padded.py.
#include <algorithm>
#include <array>

#include "balance.h"
#include "classes.h"

namespace motet {
namespace {

// Limits tried side by side: one walk waits for a division at each rank, eight walks wait for it together.
constexpr int kNumProbes = 8;

// Rounded down. Floats divide several times faster than 64-bit integers and up to 2^52 as exactly: a quotient that is
// no integer misses the next one by 1 / divisor or more, twice what rounding adds to it.
std::int64_t quotient(std::int64_t dividend, std::int64_t divisor) {
    if (dividend < std::int64_t{1} << 52) return static_cast<std::int64_t>(static_cast<double>(dividend) / divisor);
    return dividend / divisor;
}

// What the item at a position costs alone. 32 bits a position: half of what the costs themselves take.
struct Descending {
    std::vector<std::int64_t> costs;  // [num_classes]
    std::vector<std::int32_t> class_of_position;

    Descending(const Classes& classes, std::int64_t linear, std::int64_t quadratic)
        : class_of_position(classes.of_items.size()) {
        costs.reserve(classes.lengths.size());
        for (const auto length : classes.lengths) costs.push_back(length * (linear + quadratic * length));
        for (std::size_t c = 0; c < costs.size(); ++c) {
            std::fill(class_of_position.begin() + classes.starts[c], class_of_position.begin() + classes.starts[c + 1],
                      static_cast<std::int32_t>(c));
        }
    }

    std::int64_t size() const { return static_cast<std::int64_t>(class_of_position.size()); }
    std::int64_t operator[](std::int64_t position) const { return costs[class_of_position[position]]; }

    // How many items the batch that begins at `first` holds under `limit`: its first item is its longest.
    std::int64_t batch_size(std::int64_t first, std::int64_t limit) const {
        const std::int64_t longest = (*this)[first];
        return longest == 0 ? size() - first : std::min(size() - first, quotient(limit, longest));
    }
};

// How many of the limits, ascending, are too small for all items to find a place.
int num_too_small(const Descending& descending, int num_ranks, const std::array<std::int64_t, kNumProbes>& limits) {
    std::array<std::int64_t, kNumProbes> first{};
    for (int rank = 0; rank < num_ranks && first[0] < descending.size(); ++rank) {
        for (int probe = 0; probe < kNumProbes; ++probe) {
            if (first[probe] < descending.size()) first[probe] += descending.batch_size(first[probe], limits[probe]);
        }
    }
    const auto is_left = [&](std::int64_t place) { return place < descending.size(); };
    return static_cast<int>(std::count_if(first.begin(), first.end(), is_left));
}

std::int64_t optimum(const Classes& classes, const Descending& descending, int num_ranks) {
    if (descending.size() == 0 || descending[0] == 0) return 0;
    std::int64_t total = 0;
    for (std::size_t c = 0; c < descending.costs.size(); ++c) {
        total += descending.costs[c] * (classes.starts[c + 1] - classes.starts[c]);
    }
    std::int64_t low = std::max(descending[0], (total - 1) / num_ranks + 1);                 // longest alone, or the mean
    std::int64_t high = descending[0] * ((descending.size() + num_ranks - 1) / num_ranks);  // equal counts
    while (low < high) {
        std::array<std::int64_t, kNumProbes> limits;
        const std::int64_t step = (high - low) / (kNumProbes + 1) + 1;
        for (int probe = 0; probe < kNumProbes; ++probe) limits[probe] = low + std::min(probe * step, high - 1 - low);
        const int too_small = num_too_small(descending, num_ranks, limits);
        if (too_small < kNumProbes) high = limits[too_small];
        if (too_small > 0) low = limits[too_small - 1] + 1;
    }
    return high;
}

}  // namespace

GroupedPlacement padded(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic) {
    const auto classes = by_length(lengths);
    std::vector<Take> takes;
    std::vector<std::int64_t> loads(num_ranks, 0);
    std::int64_t limit = 0;
    {
        const Descending descending(classes, linear, quadratic);
        limit = optimum(classes, descending, num_ranks);
        std::int64_t position = 0;
        std::int32_t place = 0;  // the class of the position
        for (std::int32_t rank = 0; rank < num_ranks && position < descending.size(); ++rank) {
            const std::int64_t size = descending.batch_size(position, limit);
            loads[rank] = size * descending[position];
            for (const std::int64_t end = position + size; position < end;) {
                const std::int64_t until = std::min<std::int64_t>(end, classes.starts[place + 1]);
                takes.push_back({rank, place, static_cast<std::int32_t>(until - position)});
                position = until;
                if (position == classes.starts[place + 1]) ++place;
            }
        }
    }
    return place(classes, takes, std::move(loads), limit);
}

std::int64_t padded_bound(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic) {
    const auto classes = by_length(lengths);
    return optimum(classes, Descending(classes, linear, quadratic), num_ranks);
}

}  // namespace motet
