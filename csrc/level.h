// level.cpp: move few items between groups, ranks or nodes; see src/motet/balance/reference/level.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace motet {

struct Held {
    std::int64_t weight;
    std::int32_t number;
};

// What one rank or node holds, heaviest first, then by number.
struct Group {
    std::vector<Held> items;
    std::int64_t load = 0, target = 0, limit = 0;
};

// turns: by item number, whose turn to be given is first; empty: the heaviest first.
void level(std::vector<Group>& groups, std::span<const std::int32_t> turns = {});

// whole * part / parts, rounded down, without overflow.
inline std::int64_t share_of(std::int64_t whole, std::int64_t part, std::int64_t parts) {
    return static_cast<std::int64_t>(static_cast<__int128>(whole) * part / parts);
}

}  // namespace motet
