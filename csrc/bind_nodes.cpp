// Node-wise renaming of balanced batches.
#include "bind.h"
#include "nodes.h"

namespace motet {
namespace {

Output<std::int64_t> bound_place_on_nodes(const Input<std::int32_t>& sources, const Input<std::int32_t>& batches,
                                          const Input<std::int64_t>& sizes, const Input<std::int32_t>& node_sizes) {
    std::vector<std::int64_t> ranks;
    {
        nb::gil_scoped_release released;
        ranks = place_on_nodes(view(sources), view(batches), view(sizes), Nodes(view(node_sizes)));
    }
    return to_numpy(std::move(ranks));
}

}  // namespace

void bind_nodes(nb::module_& m) {
    m.def("place_on_nodes", &bound_place_on_nodes, nb::arg("sources").noconvert(), nb::arg("batches").noconvert(),
          nb::arg("sizes").noconvert(), nb::arg("node_sizes").noconvert());
}

}  // namespace motet
