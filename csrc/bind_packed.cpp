// One phase without padding: placements and their bounds.
#include "bind.h"

namespace motet {
namespace {

nb::tuple assign(const Input<std::int64_t>& weights, int num_ranks, bool equal_counts, std::int64_t num_steps) {
    return placed(num_ranks, [&] { return packed(view(weights), num_ranks, equal_counts, num_steps); });
}

std::int64_t lower_bound(const Input<std::int64_t>& weights, int num_ranks) {
    nb::gil_scoped_release released;
    return packed_bound(view(weights), num_ranks);
}

}  // namespace

void bind_packed(nb::module_& m) {
    m.def("packed", &assign, nb::arg("weights").noconvert(), nb::arg("num_ranks"),
          nb::arg("equal_counts"), nb::arg("num_steps"));
    m.def("packed_bound", &lower_bound, nb::arg("weights").noconvert(), nb::arg("num_ranks"));
}

}  // namespace motet
