// What Python sees of passes in bubbles; the contract is in src/motet/planner/bubble_filling/_pass_ends.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "pass_ends.h"

namespace nb = nanobind;

namespace {

using Given = std::tuple<std::vector<double>, std::vector<double>, std::vector<std::int64_t>, double, std::int64_t>;

motet::PassEnds pass_ends(std::vector<std::vector<Given>> given, double send_s) {
    std::vector<std::vector<motet::PlacedSlices>> ranks;
    for (auto& of_rank : given) {
        std::vector<motet::PlacedSlices> placed;
        for (auto& [starts, stops, capacity, slice_s, num] : of_rank) {
            const bool match = stops.size() == starts.size() && capacity.size() == starts.size() + 1;
            const auto ascends = [](const auto& values) { return std::is_sorted(values.begin(), values.end()); };
            if (!match || !ascends(starts) || !ascends(capacity) || capacity[0] < 0 || !(slice_s > 0) || num < 1) {
                throw std::invalid_argument("PassEnds: starts, stops, capacity, slice_s and num do not match, or do not ascend");
            }
            placed.push_back({std::move(starts), std::move(stops), std::move(capacity), slice_s, num});
        }
        ranks.push_back(std::move(placed));
    }
    return {std::move(ranks), send_s};
}

nb::tuple through(const motet::PassEnds& ends, const std::vector<double>& begins_s, std::vector<double> ends_s) {
    if (ends_s.size() != ends.num_ranks()) throw std::invalid_argument("through: there is one end a rank");
    ends.through(begins_s, ends_s);
    return nb::tuple(nb::cast(ends_s));
}

}  // namespace

NB_MODULE(_pass_ends, m) {
    m.doc() = "Native core of motet.planner.bubble_filling.";
    nb::class_<motet::PassEnds>(m, "PassEnds")
        .def("__init__", [](motet::PassEnds* self, std::vector<std::vector<Given>> ranks, double send_s) {
            new (self) motet::PassEnds(pass_ends(std::move(ranks), send_s));
        }, nb::arg("ranks"), nb::arg("send_s"))
        .def("through", &through, nb::arg("begins_s"), nb::arg("ends_s"));
}
