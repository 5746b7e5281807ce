// joint_home.cpp: minimal movement, all phases; see src/motet/balance/reference/joint_home.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "home.h"

namespace motet {

struct JointHomePlacement {
    std::vector<std::int32_t> ranks;  // [num_examples]
    std::vector<std::int64_t> loads;  // [num_ranks * num_phases], a row a rank
    std::vector<std::int64_t> bound;  // [num_phases]
};

// costs: [num_examples * num_phases], a row an example, with a sum that fits; sizes: [num_examples], bytes.
JointHomePlacement joint_home(std::span<const std::int64_t> costs, int num_phases, int num_ranks, Home home,
                              std::span<const std::int64_t> sizes, int ranks_per_node);

}  // namespace motet
