// Node-wise renaming of balanced batches.
#include "bind.h"
#include "nodes.h"

namespace motet {
namespace {

Output<std::int64_t> bound_place_on_nodes(const Input<std::int64_t, 2>& volume, int ranks_per_node) {
    std::vector<std::int64_t> ranks;
    {
        nb::gil_scoped_release released;
        ranks = place_on_nodes(volume.data(), static_cast<int>(volume.shape(0)), ranks_per_node);
    }
    return to_numpy(std::move(ranks));
}

}  // namespace

void bind_nodes(nb::module_& m) {
    m.def("place_on_nodes", &bound_place_on_nodes, nb::arg("volume").noconvert(), nb::arg("ranks_per_node"));
}

}  // namespace motet
