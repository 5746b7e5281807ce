// Minimal movement: placements that start from where the items are.
#include "bind.h"
#include "home.h"
#include "joint_home.h"

namespace motet {
namespace {

nb::tuple bound_packed_home(const Input<std::int64_t>& weights, int num_ranks, const Input<std::int32_t>& home,
                            int ranks_per_node) {
    return placed(num_ranks, [&] { return packed_home(view(weights), num_ranks, view(home), ranks_per_node); });
}

nb::tuple bound_joint_home(const Input<std::int64_t, 2>& costs, int num_ranks, const Input<std::int32_t>& home,
                           const Input<std::int64_t>& sizes, int ranks_per_node) {
    const JointCosts rows{{costs.data(), costs.size()}, static_cast<int>(costs.shape(1))};
    return placed(num_ranks, [&] { return joint_home(rows, num_ranks, view(home), view(sizes), ranks_per_node); });
}

}  // namespace

void bind_home(nb::module_& m) {
    m.def("packed_home", &bound_packed_home, nb::arg("weights").noconvert(), nb::arg("num_ranks"),
          nb::arg("home").noconvert(), nb::arg("ranks_per_node"));
    m.def("joint_home", &bound_joint_home, nb::arg("costs").noconvert(), nb::arg("num_ranks"),
          nb::arg("home").noconvert(), nb::arg("sizes").noconvert(), nb::arg("ranks_per_node"));
}

}  // namespace motet
