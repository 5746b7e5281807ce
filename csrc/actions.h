// The actions of a Program, read from Python's tuples in place: a million of them take as long as one pass over memory.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace motet {

namespace nb = nanobind;

constexpr std::size_t num_action_fields = 5;  // stage, kind, microbatch, part, peer

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

inline std::int32_t number_of(PyObject* value) {
    const long number = PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    if (number != static_cast<std::int32_t>(number)) throw nb::value_error("no int32 holds a number of an Action");
    return static_cast<std::int32_t>(number);
}

// rows: a sequence a rank, which are kept. items: all actions, rank by rank. columns: [6, num_actions], row by row:
// rank, stage, code of the kind, microbatch, part and peer.
struct Actions {
    std::vector<nb::object> rows;
    std::vector<PyObject*> items;
    std::vector<std::int32_t> columns;
};

inline Actions read_actions(const nb::tuple& given, nb::dict codes) {
    Actions actions;
    for (const auto row : given) {
        actions.rows.push_back(nb::steal(PySequence_Fast(row.ptr(), "the actions of a rank must be a tuple")));
        if (!actions.rows.back()) throw nb::python_error();
        auto** first = PySequence_Fast_ITEMS(actions.rows.back().ptr());
        actions.items.insert(actions.items.end(), first, first + PySequence_Fast_GET_SIZE(actions.rows.back().ptr()));
    }
    const auto count = actions.items.size();
    actions.columns.resize((num_action_fields + 1) * count);
    Codes kinds(std::move(codes));
    std::size_t at = 0;
    for (std::size_t rank = 0; rank < actions.rows.size(); ++rank) {
        for (const auto stop = at + PySequence_Fast_GET_SIZE(actions.rows[rank].ptr()); at < stop; ++at) {
            auto* item = actions.items[at];
            if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != num_action_fields) {
                throw nb::type_error("an element of Program.actions is no Action");
            }
            actions.columns[at] = static_cast<std::int32_t>(rank);
            for (std::size_t field = 0; field < num_action_fields; ++field) {
                auto* value = PyTuple_GET_ITEM(item, field);
                actions.columns[(field + 1) * count + at] = field == 1 ? kinds.of(value) : number_of(value);
            }
        }
    }
    return actions;
}

}  // namespace motet
