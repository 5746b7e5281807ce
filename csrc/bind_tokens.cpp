// Context parallelism: the work of each block of a sequence.
#include "bind.h"
#include "tokens.h"

namespace motet {
namespace {

using Column = Input<std::int64_t>;

Output<std::int64_t> pairs_of(const Column& length, const Column& document, const Column& modality,
                              const Column& instance, const Column& attends_to, std::int64_t block) {
    std::vector<std::int64_t> pairs;
    {
        nb::gil_scoped_release released;
        pairs = block_pairs({view(length), view(document), view(modality), view(instance), view(attends_to)}, block);
    }
    return to_numpy(std::move(pairs));
}

}  // namespace

void bind_tokens(nb::module_& m) {
    m.def("block_pairs", &pairs_of, nb::arg("length").noconvert(), nb::arg("document").noconvert(),
          nb::arg("modality").noconvert(), nb::arg("instance").noconvert(), nb::arg("attends_to").noconvert(),
          nb::arg("block"));
}

}  // namespace motet
