// joint_home.cpp: minimal movement, all phases; see src/motet/balance/reference/joint_home.py.
#pragma once

#include <cstdint>
#include <span>

#include "home.h"
#include "joint.h"

namespace motet {

// sizes: [num_examples], the bytes that move with an example.
JointPlacement joint_home(JointCosts costs, Home home, std::span<const std::int64_t> sizes, const Nodes& nodes);

}  // namespace motet
