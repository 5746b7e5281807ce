#include "changes.h"

#include <cstring>
#include <limits>

#include "wide.h"

namespace motet {
namespace {

constexpr std::ptrdiff_t kLanes = 4;

// GCC's and Clang's: an operation on all lanes, in as many instructions as the machine needs for them.
using Lanes = std::int64_t __attribute__((vector_size(sizeof(std::int64_t) * kLanes)));
using Bits = std::uint64_t __attribute__((vector_size(sizeof(std::uint64_t) * kLanes)));

MOTET_WIDE bool any_below(const std::int64_t* given, std::ptrdiff_t num_given, const std::int64_t* taken,
                          std::ptrdiff_t num_taken, std::int64_t room) {
    constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
    const Lanes least = Lanes{} + static_cast<std::int64_t>((static_cast<std::uint64_t>(room) - 1) ^ kSign);
    for (std::ptrdiff_t first = 0; first < num_taken; first += kLanes) {
        Bits those = Bits{} + std::numeric_limits<std::int64_t>::max();  // no weight is above it
        if (first + kLanes <= num_taken) {
            std::memcpy(&those, taken + first, sizeof those);
        } else {
            for (std::ptrdiff_t lane = 0; first + lane < num_taken; ++lane) {
                those[lane] = static_cast<std::uint64_t>(taken[first + lane]);
            }
        }
        Lanes found{};
        for (std::ptrdiff_t i = 0; i < num_given; ++i) {
            // One comparison for two: less 1, what is not above 0 is a large number without a sign.
            const Bits changes = (static_cast<std::uint64_t>(given[i]) - 1 + kSign) - those;
            found |= Lanes(changes) < least;
        }
        if (found[0] | found[1] | found[2] | found[3]) return true;
    }
    return false;
}

}  // namespace

bool any_brings_closer(std::span<const std::int64_t> given, std::span<const std::int64_t> taken, std::int64_t room) {
    return room > 0 && any_below(given.data(), std::ssize(given), taken.data(), std::ssize(taken), room);
}

}  // namespace motet
