// Minimal movement: placements that start from where the items are.
#include "bind.h"
#include "home.h"
#include "joint_home.h"

namespace motet {
namespace {

nb::tuple bound_packed_home(const Input<std::int64_t>& weights, int num_ranks, const Input<std::int32_t>& home,
                            int ranks_per_node) {
    Placement placement;
    Groups groups;
    {
        nb::gil_scoped_release released;
        placement = packed_home(view(weights), num_ranks, view(home), ranks_per_node);
        groups = group_by_rank(placement.ranks, num_ranks);
    }
    return nb::make_tuple(to_numpy(std::move(placement.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), to_numpy(std::move(placement.loads)), placement.bound);
}

nb::tuple bound_joint_home(const Input<std::int64_t, 2>& costs, int num_ranks, const Input<std::int32_t>& home,
                           const Input<std::int64_t>& sizes, int ranks_per_node) {
    const auto num_phases = costs.shape(1);
    JointHomePlacement placement;
    Groups groups;
    {
        nb::gil_scoped_release released;
        placement = joint_home({costs.data(), costs.size()}, static_cast<int>(num_phases), num_ranks, view(home),
                               view(sizes), ranks_per_node);
        groups = group_by_rank(placement.ranks, num_ranks);
    }
    const auto loads = to_numpy(std::move(placement.loads)).cast();
    return nb::make_tuple(to_numpy(std::move(placement.ranks)), to_numpy(std::move(groups.items)),
                          to_numpy(std::move(groups.offsets)), loads.attr("reshape")(num_ranks, num_phases),
                          to_numpy(std::move(placement.bound)));
}

}  // namespace

void bind_home(nb::module_& m) {
    m.def("packed_home", &bound_packed_home, nb::arg("weights").noconvert(), nb::arg("num_ranks"),
          nb::arg("home").noconvert(), nb::arg("ranks_per_node"));
    m.def("joint_home", &bound_joint_home, nb::arg("costs").noconvert(), nb::arg("num_ranks"),
          nb::arg("home").noconvert(), nb::arg("sizes").noconvert(), nb::arg("ranks_per_node"));
}

}  // namespace motet
