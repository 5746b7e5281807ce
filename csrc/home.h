// home.cpp: minimal movement, one phase; see src/motet/balance/reference/home.py.
#pragma once

#include <cstdint>
#include <span>

#include "balance.h"
#include "nodes.h"

namespace motet {

using Home = std::span<const std::int32_t>;  // [num_items], the rank that holds each item

Placement packed_home(Weights weights, Home home, const Nodes& nodes);

}  // namespace motet
