// nodes.cpp: node-wise renaming of batches; see src/motet/balance/reference/nodes.py.
#pragma once

#include <cstdint>
#include <vector>

namespace motet {

// volume: [num_ranks (source), num_ranks (batch)], row-major. Returns the rank of each batch.
std::vector<std::int64_t> place_on_nodes(const std::int64_t* volume, int num_ranks, int ranks_per_node);

}  // namespace motet
