// What Python sees of the engine; the contract is in src/motet/simulate/_engine.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <memory>
#include <utility>

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

// Codes of kinds. A kind is one object wherever it stands, so that its address nearly always tells its code.
class Codes {
   public:
    explicit Codes(nb::dict codes) : codes_(std::move(codes)) {}

    std::int32_t of(PyObject* kind) {
        auto& [seen, code] = seen_[(reinterpret_cast<std::uintptr_t>(kind) >> 4) % seen_.size()];
        if (seen != kind) {
            code = nb::cast<std::int32_t>(codes_[nb::handle(kind)]);
            seen = kind;
        }
        return code;
    }

   private:
    nb::dict codes_;
    std::array<std::pair<PyObject*, std::int32_t>, 64> seen_{};
};

// Reads tuples in place: a million of them take as long as one pass over memory does.
nb::object columns(const nb::tuple& actions, nb::dict codes) {
    constexpr std::size_t num_fields = 5;
    std::vector<nb::object> rows;
    std::size_t count = 0;
    for (const auto row : actions) {
        rows.push_back(nb::steal(PySequence_Fast(row.ptr(), "the actions of a rank must be a tuple")));
        if (!rows.back()) throw nb::python_error();
        count += PySequence_Fast_GET_SIZE(rows.back().ptr());
    }
    std::vector<std::int32_t> table((num_fields + 1) * count);
    Codes kinds(std::move(codes));
    std::size_t at = 0;
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        auto** items = PySequence_Fast_ITEMS(rows[rank].ptr());
        for (auto** item = items; item != items + PySequence_Fast_GET_SIZE(rows[rank].ptr()); ++item, ++at) {
            if (!PyTuple_Check(*item) || PyTuple_GET_SIZE(*item) != num_fields) {
                throw nb::type_error("an element of Program.actions is no Action");
            }
            table[at] = static_cast<std::int32_t>(rank);
            for (std::size_t field = 0; field < num_fields; ++field) {
                auto* value = PyTuple_GET_ITEM(*item, field);
                table[(field + 1) * count + at] =
                    field == 1 ? kinds.of(value) : static_cast<std::int32_t>(PyLong_AsLong(value));
            }
            if (PyErr_Occurred()) throw nb::python_error();
        }
    }
    return to_numpy(std::move(table), num_fields + 1, count);
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
