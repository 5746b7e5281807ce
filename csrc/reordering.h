// The order of microbatches in a pipeline; see src/motet/balance/reference/reordering.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// As StepGraph of src/motet/balance/step_graph.py.
struct StepGraph {
    std::span<const std::int32_t> row, position, offsets, needs, gaps;
    std::int64_t num_last, num_microbatches;

    std::int64_t num_operations() const { return static_cast<std::int64_t>(row.size()); }
};

// What each row takes for each group, [num_groups, num_rows], and the groups of each island, [num_islands,
// num_microbatches].
struct Islands {
    const std::int64_t *durations, *groups;
    std::int64_t num_rows, num_islands;
};

struct OrderedIslands {
    std::vector<std::int64_t> groups;     // [num_islands, num_microbatches]
    std::vector<std::int64_t> makespans;  // [num_islands]
};

std::vector<std::int64_t> island_makespans(const StepGraph& graph, const Islands& islands);
OrderedIslands order_islands(const StepGraph& graph, const Islands& islands, std::span<const std::int64_t> given,
                             std::int64_t limit, std::int64_t num_visits);

}  // namespace motet
