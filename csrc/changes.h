// changes.cpp: what a swap changes.
#pragma once

#include <cstdint>
#include <span>

namespace motet {

// Whether a weight given for one that is taken brings closer two loads that are `room` apart: whether it is the larger by
// less than that. Every pair is looked at, several at once: most pairs of ranks have none, and the sizes of what ranks
// have are small.
bool any_brings_closer(std::span<const std::int64_t> given, std::span<const std::int64_t> taken, std::int64_t room);

}  // namespace motet
