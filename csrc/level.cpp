// Minimal movement between groups; see src/motet/balance/reference/level.py.
#include "level.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

namespace motet {
namespace {

constexpr std::size_t kMaxPartners = 64;
constexpr Held kNothing{0, -1};

bool comes_before(const Held& a, const Held& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.number < b.number;
}

void put_in(std::vector<Held>& items, const Held& item) {
    items.insert(std::upper_bound(items.begin(), items.end(), item, comes_before), item);
}

void take_out(std::vector<Held>& items, const Held& item) {
    items.erase(std::lower_bound(items.begin(), items.end(), item, comes_before));
}

// An item to give, and one to take or none, whose difference is nearest to `left`. As what is taken grows, so does what
// is wanted in return, so that one walk over each group finds all pairs.
std::pair<Held, Held> best_swap(const std::vector<Held>& heavy, const std::vector<Held>& light, std::int64_t left,
                                std::int64_t moved, std::int64_t room) {
    std::pair<Held, Held> best{kNothing, kNothing};
    std::int64_t smallest_miss = moved ? left : room;
    std::size_t after = heavy.size();  // the first that is lighter than what is wanted
    for (std::size_t place = 0; place <= light.size() && smallest_miss > 0; ++place) {
        const Held take = place == 0 ? kNothing : light[light.size() - place];
        const std::int64_t wanted = left + take.weight;
        while (after > 0 && heavy[after - 1].weight < wanted) --after;
        for (std::size_t i = after > 0 ? after - 1 : 0; i <= after && i < heavy.size(); ++i) {
            const std::int64_t change = heavy[i].weight - take.weight;
            const std::int64_t miss = std::abs(left - change);
            if (miss < smallest_miss && moved + change > 0 && moved + change < room) {
                smallest_miss = miss;
                best = {heavy[i], take};
            }
        }
    }
    return best;
}

bool exchange(Group& heavy, Group& light, std::span<const std::int32_t> turns) {
    const __int128 apart = static_cast<__int128>(heavy.load - heavy.target) - (light.load - light.target);
    const auto room = static_cast<std::int64_t>(std::min<__int128>(apart, INT64_MAX));
    const std::int64_t gap =
        std::max<std::int64_t>(1, std::min(heavy.load - heavy.target, light.target - light.load));
    if (room <= gap) return false;
    std::vector<Held> given, rest = heavy.items;
    std::int64_t left = gap;
    if (!turns.empty()) {
        std::ranges::sort(rest, [&](const Held& a, const Held& b) { return turns[a.number] < turns[b.number]; });
    }
    for (const Held& item : rest) {
        if (item.weight == 0 || item.weight > left) continue;
        given.push_back(item);
        left -= item.weight;
    }
    rest = heavy.items;
    for (const Held& item : given) take_out(rest, item);
    const auto [give, take] = best_swap(rest, light.items, left, gap - left, room);
    if (give.number >= 0) {
        given.push_back(give);
        take_out(rest, give);
    }
    if (given.empty()) return false;
    if (take.number >= 0) {
        take_out(light.items, take);
        put_in(rest, take);
    }
    std::int64_t change = -take.weight;
    for (const Held& item : given) {
        put_in(light.items, item);
        change += item.weight;
    }
    heavy.items = std::move(rest);
    heavy.load -= change;
    light.load += change;
    return true;
}

}  // namespace

void level(std::vector<Group>& groups, std::span<const std::int32_t> turns) {
    std::set<std::pair<std::int64_t, int>> lightest_first;  // (load - limit, group)
    const auto key = [&](int group) { return std::pair{groups[group].load - groups[group].limit, group}; };
    for (int group = 0; group < static_cast<int>(groups.size()); ++group) lightest_first.insert(key(group));
    for (std::size_t exchanges_left = 100 + 20 * groups.size(); exchanges_left > 0; --exchanges_left) {
        const auto [over, heavy] = *lightest_first.rbegin();
        if (over <= 0) return;
        std::size_t partners_left = std::min(kMaxPartners, groups.size() - 1);
        auto partner = lightest_first.begin();
        for (; partners_left > 0; --partners_left, ++partner) {
            const auto before = *partner;
            if (!exchange(groups[heavy], groups[before.second], turns)) continue;
            lightest_first.erase(before);
            lightest_first.erase({over, heavy});
            lightest_first.insert(key(before.second));
            lightest_first.insert(key(heavy));
            break;
        }
        if (partners_left == 0) return;
    }
}

}  // namespace motet
