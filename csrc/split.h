// Items on ranks under a limit, cut where no rank has room; see src/motet/balance/reference/splitting.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// Costs and overheads are row-major [num_items, num_phases], the rest [num_items].
struct Divisible {
    std::span<const std::int64_t> costs, overheads, units, parts, turns, phases;
    int num_phases;
};

// One entry a fragment: the units begin .. end of an item, by item, then by begin; what finds no room is left out.
struct Pieces {
    std::vector<std::int64_t> items, begins, ends;
    std::vector<std::int32_t> ranks;
};

Pieces pour(const Divisible& given, std::span<const std::int64_t> limits, int num_ranks);

}  // namespace motet
