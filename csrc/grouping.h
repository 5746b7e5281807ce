// OmniBal's groups of samples; see src/motet/balance/reference/grouping.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

struct GroupLimits {
    std::int64_t max_vision, max_text;  // no group above either, but a single sample
    std::int64_t min_vision, min_text;  // a group that reaches either is full
};

struct SampleGroups {
    std::vector<std::int64_t> items, offsets;  // [num_samples]; [num_groups + 1]: full, oversized, then leftover groups
    std::int64_t num_full = 0, num_oversized = 0;
};

SampleGroups isf(std::span<const std::int64_t> vision, std::span<const std::int64_t> text, const GroupLimits& limits,
                 int num_iterations, std::uint64_t seed);

}  // namespace motet
