// nodes.cpp: node-wise renaming of batches; see src/motet/balance/reference/nodes.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// Of each item the source, the batch and the size. Returns the rank of each batch.
std::vector<std::int64_t> place_on_nodes(std::span<const std::int32_t> sources, std::span<const std::int32_t> batches,
                                         std::span<const std::int64_t> sizes, int num_ranks, int ranks_per_node);

}  // namespace motet
