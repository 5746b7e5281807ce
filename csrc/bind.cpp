#include "bind.h"

namespace motet {

Groups group_by_rank(const std::vector<std::int32_t>& ranks, int num_ranks) {
    Groups groups{std::vector<std::int64_t>(ranks.size()), std::vector<std::int64_t>(num_ranks + 1, 0)};
    for (const auto rank : ranks) ++groups.offsets[rank + 1];
    for (int rank = 0; rank < num_ranks; ++rank) groups.offsets[rank + 1] += groups.offsets[rank];
    auto next = groups.offsets;
    for (std::size_t item = 0; item < ranks.size(); ++item) {
        groups.items[next[ranks[item]]++] = static_cast<std::int64_t>(item);
    }
    return groups;
}

nb::tuple fields(Placement&& found, Groups&& groups) {
    return nb::make_tuple(to_numpy(std::move(found.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), to_numpy(std::move(found.loads)), found.bound);
}

nb::tuple fields(JointPlacement&& found, Groups&& groups) {
    const auto num_ranks = groups.offsets.size() - 1, num_phases = found.bound.size();
    const auto loads = to_numpy(std::move(found.loads)).cast();
    return nb::make_tuple(to_numpy(std::move(found.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), loads.attr("reshape")(num_ranks, num_phases),
                          to_numpy(std::move(found.bound)));
}

}  // namespace motet
