// The order of microbatches in a pipeline; see src/motet/balance/reference/reordering.py.
#pragma once

#include <cstdint>
#include <vector>

namespace motet {

// What each microbatch takes on each stage, [num_microbatches, num_stages].
struct Durations {
    const std::int64_t *forward, *backward;
    std::int64_t num_microbatches, num_stages;

    const std::int64_t* forward_of(std::int64_t microbatch) const { return forward + microbatch * num_stages; }
    const std::int64_t* backward_of(std::int64_t microbatch) const { return backward + microbatch * num_stages; }
};

std::int64_t pipeline_makespan(const Durations& durations, const std::vector<std::int64_t>& order);
std::vector<std::int64_t> order_microbatches(const Durations& durations);

}  // namespace motet
