// All phases at once: whole examples on ranks.
#include "bind.h"
#include "joint.h"

namespace motet {
namespace {

// (ranks, items, offsets, loads [num_ranks, num_phases], bound [num_phases]): items are grouped by rank, in item order.
nb::tuple assign_jointly(const Input<std::int64_t, 2>& costs, int num_ranks, std::int64_t max_pairs) {
    const auto num_phases = costs.shape(1);
    JointPlacement placement;
    Groups groups;
    {
        nb::gil_scoped_release released;
        placement = joint({{costs.data(), costs.size()}, static_cast<int>(num_phases)}, num_ranks, max_pairs);
        groups = group_by_rank(placement.ranks, num_ranks);
    }
    const auto loads = to_numpy(std::move(placement.loads)).cast();
    return nb::make_tuple(to_numpy(std::move(placement.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), loads.attr("reshape")(num_ranks, num_phases),
                          to_numpy(std::move(placement.bound)));
}

}  // namespace

void bind_joint(nb::module_& m) {
    m.def("joint", &assign_jointly, nb::arg("costs").noconvert(), nb::arg("num_ranks"), nb::arg("max_pairs"));
}

}  // namespace motet
