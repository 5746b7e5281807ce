// The order of microbatches in a pipeline.
#include "bind.h"
#include "reordering.h"

namespace motet {
namespace {

using Column = Input<std::int32_t>;
using Table = Input<std::int64_t, 2>;

StepGraph graph_of(const Column& row, const Column& position, const Column& offsets, const Column& needs,
                   const Input<std::int32_t, 2>& gaps, std::int64_t num_last) {
    const auto num_microbatches = gaps.shape(0);
    return {view(row),        view(position), view(offsets), view(needs), {gaps.data(), 4 * num_microbatches}, num_last,
            static_cast<std::int64_t>(num_microbatches)};
}

Islands islands_of(const Table& durations, const Table& groups) {
    return {durations.data(), groups.data(), static_cast<std::int64_t>(durations.shape(1)),
            static_cast<std::int64_t>(groups.shape(0))};
}

}  // namespace

void bind_reordering(nb::module_& m) {
    m.def(
        "island_makespans",
        [](const Column& row, const Column& position, const Column& offsets, const Column& needs,
           const Input<std::int32_t, 2>& gaps, const Table& durations, const Table& groups) {
            std::vector<std::int64_t> makespans;
            {
                nb::gil_scoped_release released;
                makespans = island_makespans(graph_of(row, position, offsets, needs, gaps, 0),
                                             islands_of(durations, groups));
            }
            return to_numpy(std::move(makespans));
        },
        nb::arg("row").noconvert(), nb::arg("position").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("needs").noconvert(), nb::arg("gaps").noconvert(), nb::arg("durations").noconvert(),
        nb::arg("groups").noconvert());
    m.def(
        "order_islands",
        [](const Column& row, const Column& position, const Column& offsets, const Column& needs,
           const Input<std::int32_t, 2>& gaps, std::int64_t num_last, const Table& durations,
           const Table& groups, const Input<std::int64_t>& given, std::int64_t limit, std::int64_t num_visits) {
            OrderedIslands ordered;
            {
                nb::gil_scoped_release released;
                ordered = order_islands(graph_of(row, position, offsets, needs, gaps, num_last),
                                        islands_of(durations, groups), view(given), limit, num_visits);
            }
            return nb::make_tuple(to_numpy(std::move(ordered.groups)), to_numpy(std::move(ordered.makespans)));
        },
        nb::arg("row").noconvert(), nb::arg("position").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("needs").noconvert(), nb::arg("gaps").noconvert(), nb::arg("num_last"),
        nb::arg("durations").noconvert(), nb::arg("groups").noconvert(), nb::arg("given").noconvert(),
        nb::arg("limit"), nb::arg("num_visits"));
}

}  // namespace motet
