// All phases at once: whole examples on ranks.
#include "bind.h"

namespace motet {
namespace {

nb::tuple assign_jointly(const Input<std::int64_t, 2>& costs, int num_ranks, std::int64_t max_pairs) {
    const JointCosts rows{{costs.data(), costs.size()}, static_cast<int>(costs.shape(1))};
    return placed(num_ranks, [&] { return joint(rows, num_ranks, max_pairs); });
}

}  // namespace

void bind_joint(nb::module_& m) {
    m.def("joint", &assign_jointly, nb::arg("costs").noconvert(), nb::arg("num_ranks"), nb::arg("max_pairs"));
}

}  // namespace motet
