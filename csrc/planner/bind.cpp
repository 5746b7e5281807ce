// What Python sees of cuts; the contract is in src/motet/planner/stages/_cuts.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "cuts.h"

namespace nb = nanobind;

namespace {

using Rows = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Slowest = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<std::int64_t> best_cut(const std::vector<std::int64_t>& sums, std::int64_t num_devices,
                                   std::int64_t num_chunks, bool folded) {
    const auto num_layers = static_cast<std::int64_t>(sums.size()) - 1;
    if (num_devices < 1 || num_chunks < 1 || num_layers < num_devices * num_chunks) {
        throw std::invalid_argument("best_cut: there are fewer layers than stages");
    }
    if (sums[0] != 0 || sums.back() > motet::kMostTicks || !std::is_sorted(sums.begin(), sums.end())) {
        throw std::invalid_argument("best_cut: sums must ascend from 0, to 5 * 2^28 at most");
    }
    return motet::best_cut(sums, num_devices, num_chunks, folded);
}

void slowest_stages(const Rows& sums, const Slowest& slowest) {
    const std::size_t width = sums.shape(1);
    if (width < 2 || slowest.shape(0) != sums.shape(0) || slowest.shape(1) + 1 != width) {
        throw std::invalid_argument("slowest_stages: sums and slowest do not match");
    }
    nb::gil_scoped_release released;
    for (std::size_t row = 0; row < sums.shape(0); ++row) {
        motet::slowest_stages({sums.data() + row * width, width}, slowest.data() + row * (width - 1));
    }
}

}  // namespace

NB_MODULE(_cuts, m) {
    m.doc() = "Native core of motet.planner.stages.";
    m.def("best_cut", &best_cut, nb::arg("sums"), nb::arg("num_devices"), nb::arg("num_chunks"), nb::arg("folded"));
    m.def("slowest_stages", &slowest_stages, nb::arg("sums").noconvert(), nb::arg("slowest").noconvert());
}
