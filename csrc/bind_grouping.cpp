// Groups of samples.
#include "bind.h"
#include "grouping.h"

namespace motet {

void bind_grouping(nb::module_& m) {
    m.def(
        "isf",
        [](const Input<std::int64_t>& vision, const Input<std::int64_t>& text, std::int64_t max_vision,
           std::int64_t max_text, std::int64_t min_vision, std::int64_t min_text, int num_iterations,
           std::uint64_t seed) {
            SampleGroups groups;
            {
                nb::gil_scoped_release released;
                groups = isf(view(vision), view(text), {max_vision, max_text, min_vision, min_text}, num_iterations,
                             seed);
            }
            return nb::make_tuple(to_numpy(std::move(groups.items)), to_numpy(std::move(groups.offsets)),
                                  groups.num_full, groups.num_oversized);
        },
        nb::arg("vision").noconvert(), nb::arg("text").noconvert(), nb::arg("max_vision"), nb::arg("max_text"),
        nb::arg("min_vision"), nb::arg("min_text"), nb::arg("num_iterations"), nb::arg("seed"));
}

}  // namespace motet
