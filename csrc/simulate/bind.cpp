// What Python sees of the engine; the contract is in src/motet/simulate/_engine.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>

#include "../actions.h"
#include "engine.h"

namespace nb = nanobind;

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Input<T>& array) {
    return {array.data(), array.shape(0)};
}

template <typename T, typename... Shape>
nb::object to_numpy(std::vector<T>&& values, Shape... shape) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    auto* raw = kept.get();
    nb::capsule owner(kept.release(), [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>>(raw->data(), {shape...}, owner));
}

nb::object columns(const nb::tuple& actions, nb::dict codes) {
    auto read = motet::read_actions(actions, std::move(codes));
    const auto count = read.items.size();
    return to_numpy(std::move(read.columns), motet::num_action_fields + 1, count);
}

nb::tuple run(const Input<std::int32_t>& stream, const Input<std::int32_t>& operation, const Input<double>& seconds,
              const Input<std::int32_t>& dependent, const Input<std::int32_t>& dependency) {
    motet::Times times;
    {
        nb::gil_scoped_release released;
        times = motet::run(view(stream), view(operation), view(seconds), view(dependent), view(dependency));
    }
    const auto count = times.start.size();
    return nb::make_tuple(to_numpy(std::move(times.start), count), to_numpy(std::move(times.end), count));
}

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "Native engine of motet.simulate.";
    m.def("columns", &columns, nb::arg("actions"), nb::arg("codes"));
    m.def("run", &run, nb::arg("stream").noconvert(), nb::arg("operation").noconvert(), nb::arg("seconds").noconvert(),
          nb::arg("dependent").noconvert(), nb::arg("dependency").noconvert());
}
