// Minimal movement: placements that start from where the items are.
#include "bind.h"
#include "home.h"
#include "joint_home.h"

namespace motet {
namespace {

nb::tuple bound_packed_home(const Input<std::int64_t>& weights, const Input<std::int32_t>& home,
                            const Input<std::int32_t>& node_sizes) {
    const Nodes nodes(view(node_sizes));
    return placed(nodes.num_ranks(), [&] { return packed_home(view(weights), view(home), nodes); });
}

nb::tuple bound_joint_home(const Input<std::int64_t, 2>& costs, const Input<std::int32_t>& home,
                           const Input<std::int64_t>& sizes, const Input<std::int32_t>& node_sizes) {
    const Nodes nodes(view(node_sizes));
    const JointCosts rows{{costs.data(), costs.size()}, static_cast<int>(costs.shape(1))};
    return placed(nodes.num_ranks(), [&] { return joint_home(rows, view(home), view(sizes), nodes); });
}

}  // namespace

void bind_home(nb::module_& m) {
    m.def("packed_home", &bound_packed_home, nb::arg("weights").noconvert(), nb::arg("home").noconvert(),
          nb::arg("node_sizes").noconvert());
    m.def("joint_home", &bound_joint_home, nb::arg("costs").noconvert(), nb::arg("home").noconvert(),
          nb::arg("sizes").noconvert(), nb::arg("node_sizes").noconvert());
}

}  // namespace motet
