// One phase: packed and padded placements and their bounds.
#include "balance.h"
#include "bind.h"

namespace motet {
namespace {

// (ranks, items, offsets, loads, bound): items are grouped by rank, in item order.
template <auto algorithm, class... Options>
nb::tuple assign(const Input<std::int64_t>& weights, int num_ranks, Options... options) {
    Placement placement;
    Groups groups;
    {
        nb::gil_scoped_release released;
        placement = algorithm(view(weights), num_ranks, options...);
        groups = group_by_rank(placement.ranks, num_ranks);
    }
    return nb::make_tuple(to_numpy(std::move(placement.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), to_numpy(std::move(placement.loads)), placement.bound);
}

template <std::int64_t (*bound)(Weights, int)>
std::int64_t lower_bound(const Input<std::int64_t>& weights, int num_ranks) {
    nb::gil_scoped_release released;
    return bound(view(weights), num_ranks);
}

}  // namespace

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

void bind_phase(nb::module_& m) {
    m.def("packed", &assign<packed, bool, std::int64_t>, nb::arg("weights").noconvert(), nb::arg("num_ranks"),
          nb::arg("equal_counts"), nb::arg("num_steps"));
    m.def("padded", &assign<padded>, nb::arg("lengths").noconvert(), nb::arg("num_ranks"));
    m.def("packed_bound", &lower_bound<packed_bound>, nb::arg("weights").noconvert(), nb::arg("num_ranks"));
    m.def("padded_bound", &lower_bound<padded_bound>, nb::arg("lengths").noconvert(), nb::arg("num_ranks"));
}

}  // namespace motet
