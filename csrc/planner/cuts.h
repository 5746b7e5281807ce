// Cuts of layers into stages, as src/motet/planner/stages/partition.py makes them; the contract is in
// src/motet/planner/stages/_cuts.pyi.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

// All layers come to 2^30, but for rounding. The square of this is below kNever of cuts.cpp.
constexpr std::int64_t kMostTicks = std::int64_t{5} << 28;

// The bounds of all stages in the best cut. sums: integer seconds of the first 0, 1, ... layers, up to kMostTicks.
std::vector<std::int64_t> best_cut(std::span<const std::int64_t> sums, std::int64_t num_devices,
                                   std::int64_t num_chunks, bool folded);

// slowest: [n], the slowest stage of the best cut into 1, 2, ... n stages. sums: [n + 1], seconds of the first 0, 1,
// ... n blocks, ascending.
void slowest_stages(std::span<const double> sums, double* slowest);

}  // namespace motet
