// Context parallelism: the fast form of src/motet/balance/reference/tokens.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// The columns of Segments, each [num_segments]; checked: modality < 63, instance <= num_segments, < 2^31 tokens.
struct SegmentTable {
    std::span<const std::int64_t> length, document, modality, instance, attends_to;
};

// The (query, key) pairs that each block of consecutive tokens attends to.
std::vector<std::int64_t> block_pairs(const SegmentTable& segments, std::int64_t block);

}  // namespace motet
