// Items that are cut: where, and which rank gets each fragment.
#include "bind.h"
#include "split.h"

namespace motet {
namespace {

using Table = Input<std::int64_t, 2>;
using Column = Input<std::int64_t>;

// (item, begin, end, rank) of each fragment.
nb::tuple bound_pour(const Table& costs, const Table& overheads, const Column& units, const Column& parts,
                     const Column& turns, const Column& phases, const Column& limits, int num_ranks) {
    Pieces pieces;
    {
        nb::gil_scoped_release released;
        const auto all = [](const Table& table) { return std::span(table.data(), table.size()); };
        const Divisible given{all(costs),  all(overheads), view(units),
                              view(parts), view(turns),    view(phases), static_cast<int>(costs.shape(1))};
        pieces = pour(given, view(limits), num_ranks);
    }
    return nb::make_tuple(to_numpy(std::move(pieces.items)), to_numpy(std::move(pieces.begins)),
                          to_numpy(std::move(pieces.ends)), to_numpy(std::move(pieces.ranks)));
}

}  // namespace

void bind_split(nb::module_& m) {
    m.def("pour", &bound_pour, nb::arg("costs").noconvert(), nb::arg("overheads").noconvert(),
          nb::arg("units").noconvert(), nb::arg("parts").noconvert(), nb::arg("turns").noconvert(),
          nb::arg("phases").noconvert(), nb::arg("limits").noconvert(), nb::arg("num_ranks"));
}

}  // namespace motet
