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

#include "balance.h"
#include "joint.h"

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

// The fields of core.Assignment: ranks, items, offsets, loads, bound.
nb::tuple fields(Placement&& found, Groups&& groups);
nb::tuple fields(JointPlacement&& found, Groups&& groups);

// What `solve` finds, a Placement or a JointPlacement, with the GIL released, as the fields of core.Assignment.
template <class Solve>
nb::tuple placed(int num_ranks, const Solve& solve) {
    decltype(solve()) found;
    Groups groups;
    {
        nb::gil_scoped_release released;
        found = solve();
        groups = group_by_rank(found.ranks, num_ranks);
    }
    return fields(std::move(found), std::move(groups));
}

void bind_packed(nb::module_& m);
void bind_tokens(nb::module_& m);
void bind_split(nb::module_& m);
void bind_padded(nb::module_& m);
void bind_grouping(nb::module_& m);
void bind_reordering(nb::module_& m);
void bind_home(nb::module_& m);
void bind_nodes(nb::module_& m);
void bind_joint(nb::module_& m);

}  // namespace motet
