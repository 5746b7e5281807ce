// What Python sees of the native core; the contract of each function is in src/motet/balance/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>

#include "balance.h"

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

motet::Weights view(const Input& array) { return {array.data(), array.shape(0)}; }

template <typename T>
Output<T> to_numpy(std::vector<T>&& values) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    auto* raw = kept.get();
    nb::capsule owner(kept.release(), [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
    return Output<T>(raw->data(), {raw->size()}, owner);
}

// (ranks, items, offsets, loads, bound): items are grouped by rank, in item order.
template <motet::Placement (*algorithm)(motet::Weights, int)>
nb::tuple assign(const Input& weights, int num_ranks) {
    motet::Placement placement;
    std::vector<std::int64_t> items(weights.shape(0)), offsets(num_ranks + 1, 0);
    {
        nb::gil_scoped_release released;
        placement = algorithm(view(weights), num_ranks);
        for (const auto rank : placement.ranks) ++offsets[rank + 1];
        for (int rank = 0; rank < num_ranks; ++rank) offsets[rank + 1] += offsets[rank];
        auto next = offsets;
        for (std::size_t item = 0; item < items.size(); ++item) {
            items[next[placement.ranks[item]]++] = static_cast<std::int64_t>(item);
        }
    }
    return nb::make_tuple(to_numpy(std::move(placement.ranks)), to_numpy(std::move(items)),
                          to_numpy(std::move(offsets)), to_numpy(std::move(placement.loads)), placement.bound);
}

template <std::int64_t (*bound)(motet::Weights, int)>
std::int64_t lower_bound(const Input& weights, int num_ranks) {
    nb::gil_scoped_release released;
    return bound(view(weights), num_ranks);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native core of motet.balance: balances items over ranks.";
    m.def("packed", &assign<motet::packed>, nb::arg("weights").noconvert(), nb::arg("num_ranks"));
    m.def("padded", &assign<motet::padded>, nb::arg("lengths").noconvert(), nb::arg("num_ranks"));
    m.def("packed_bound", &lower_bound<motet::packed_bound>, nb::arg("weights").noconvert(), nb::arg("num_ranks"));
    m.def("padded_bound", &lower_bound<motet::padded_bound>, nb::arg("lengths").noconvert(), nb::arg("num_ranks"));
}
