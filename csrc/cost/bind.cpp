// What Python sees of the roofline; the contract is in src/motet/cost/_roofline.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <stdexcept>

#include "roofline.h"

namespace nb = nanobind;

namespace {

using Column = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<double, nb::shape<3, -1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kNumRates = sizeof(motet::LayerRates) / sizeof(double);

void layer_seconds(const Column& rows, const Column& pairs, const nb::tuple& rates, const Table& seconds) {
    const std::size_t count = rows.shape(0);
    if (pairs.shape(0) != count || seconds.shape(1) != count || rates.size() != kNumRates) {
        throw std::invalid_argument("layer_seconds: rows, pairs, rates and seconds do not match");
    }
    std::array<double, kNumRates> values;
    for (std::size_t place = 0; place < kNumRates; ++place) values[place] = nb::cast<double>(rates[place]);
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q] = values;
    const motet::LayerRates given{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q};
    nb::gil_scoped_release released;
    motet::layer_seconds({rows.data(), count}, {pairs.data(), count}, given, seconds.data(), seconds.data() + count,
                         seconds.data() + 2 * count);
}

}  // namespace

NB_MODULE(_roofline, m) {
    m.doc() = "Native core of motet.cost.analytic.";
    m.def("layer_seconds", &layer_seconds, nb::arg("rows").noconvert(), nb::arg("pairs").noconvert(),
          nb::arg("rates"), nb::arg("seconds").noconvert());
}
