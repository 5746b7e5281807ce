// One phase with padding: placements and their bounds.
#include "bind.h"
#include "padded_attention.h"

namespace motet {
namespace {

// (ranks, items, offsets, loads, bound): items are grouped by rank, in item order.
template <auto algorithm, class... Options>
nb::tuple assign(const Input<std::int64_t>& lengths, int num_ranks, Options... options) {
    GroupedPlacement found;
    {
        nb::gil_scoped_release released;
        found = algorithm(view(lengths), num_ranks, options...);
    }
    return nb::make_tuple(to_numpy(std::move(found.ranks)), to_numpy(std::move(found.items)),
                          to_numpy(std::move(found.offsets)), to_numpy(std::move(found.loads)), found.bound);
}

template <auto bound, class... Options>
std::int64_t lower_bound(const Input<std::int64_t>& lengths, int num_ranks, Options... options) {
    nb::gil_scoped_release released;
    return bound(view(lengths), num_ranks, options...);
}

}  // namespace

void bind_padded(nb::module_& m) {
    m.def("padded", &assign<padded, std::int64_t, std::int64_t>, nb::arg("lengths").noconvert(), nb::arg("num_ranks"),
          nb::arg("linear"), nb::arg("quadratic"));
    m.def("padded_bound", &lower_bound<padded_bound, std::int64_t, std::int64_t>, nb::arg("lengths").noconvert(),
          nb::arg("num_ranks"), nb::arg("linear"), nb::arg("quadratic"));
    m.def("padded_attention", &assign<padded_attention, std::int64_t, std::int64_t>, nb::arg("lengths").noconvert(),
          nb::arg("num_ranks"), nb::arg("linear"), nb::arg("quadratic"));
}

}  // namespace motet
