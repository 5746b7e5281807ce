// What the bindings share: arrays in and out. Each bind_*.cpp gives Python one family of algorithms; the contract of
// each function is in src/motet/balance/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace motet {

namespace nb = nanobind;

template <typename T, int num_axes = 1>
using Input = nb::ndarray<const T, nb::ndim<num_axes>, nb::c_contig, nb::device::cpu>;

template <typename T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
std::span<const T> view(const Input<T>& array) {
    return {array.data(), array.shape(0)};
}

template <typename T>
Output<T> to_numpy(std::vector<T>&& values) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    auto* raw = kept.get();
    nb::capsule owner(kept.release(), [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
    return Output<T>(raw->data(), {raw->size()}, owner);
}

// Items grouped by rank, in item order: the CSR form of `ranks`.
struct Groups {
    std::vector<std::int64_t> items, offsets;
};
Groups group_by_rank(const std::vector<std::int32_t>& ranks, int num_ranks);

void bind_phase(nb::module_& m);
void bind_split(nb::module_& m);
void bind_joint(nb::module_& m);

}  // namespace motet
