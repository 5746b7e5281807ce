// The order of microbatches in a pipeline.
#include "bind.h"
#include "reordering.h"

namespace motet {
namespace {

using Table = Input<std::int64_t, 2>;

Durations durations_of(const Table& forward, const Table& backward) {
    return {forward.data(), backward.data(), static_cast<std::int64_t>(forward.shape(0)),
            static_cast<std::int64_t>(forward.shape(1))};
}

}  // namespace

void bind_reordering(nb::module_& m) {
    m.def(
        "order_microbatches",
        [](const Table& forward, const Table& backward) {
            std::vector<std::int64_t> order;
            {
                nb::gil_scoped_release released;
                order = order_microbatches(durations_of(forward, backward));
            }
            return to_numpy(std::move(order));
        },
        nb::arg("forward").noconvert(), nb::arg("backward").noconvert());
    m.def(
        "pipeline_makespan",
        [](const Table& forward, const Table& backward, const Input<std::int64_t>& order) {
            nb::gil_scoped_release released;
            return pipeline_makespan(durations_of(forward, backward), {view(order).begin(), view(order).end()});
        },
        nb::arg("forward").noconvert(), nb::arg("backward").noconvert(), nb::arg("order").noconvert());
}

}  // namespace motet
