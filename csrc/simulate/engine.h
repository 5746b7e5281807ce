// engine.cpp: when each operation of a program starts and ends; see src/motet/simulate/engine/reference.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

struct Times {
    std::vector<double> start, end;  // of the operation of each action; NaN where it never runs
};

// stream, operation, seconds: of each action. An operation that several actions share takes place at once on all their
// streams, as long as the longest of them. dependent (an action) waits for dependency (an operation).
// O(actions + dependencies).
Times run(std::span<const std::int32_t> stream, std::span<const std::int32_t> operation, std::span<const double> seconds,
          std::span<const std::int32_t> dependent, std::span<const std::int32_t> dependency);

}  // namespace motet
