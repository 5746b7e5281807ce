// nodes.cpp: node-wise renaming of batches; see src/motet/balance/reference/nodes.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// Which ranks share a node: firsts[n] ... firsts[n + 1] - 1. sizes: the number of ranks of each node.
struct Nodes {
    std::vector<int> firsts;   // [num_nodes + 1]
    std::vector<int> of_rank;  // [num_ranks]

    explicit Nodes(std::span<const std::int32_t> sizes);
    int count() const { return static_cast<int>(firsts.size()) - 1; }
    int size(int node) const { return firsts[node + 1] - firsts[node]; }
    int num_ranks() const { return firsts.back(); }
};

// Of each item the source, the batch and the size. Returns the rank of each batch.
std::vector<std::int64_t> place_on_nodes(std::span<const std::int32_t> sources, std::span<const std::int32_t> batches,
                                         std::span<const std::int64_t> sizes, const Nodes& nodes);

}  // namespace motet
