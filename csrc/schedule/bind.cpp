// What Python sees of the pass; the contract is in src/motet/schedule/_communication.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <unordered_map>

#include "../actions.h"
#include "communication.h"

namespace nb = nanobind;

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Input<T>& array) {
    return {array.data(), array.shape(0)};
}

bool is_message(std::int32_t kind) { return kind >= motet::SEND_F && kind <= motet::RECV_B; }

// Leaves out the messages that there are.
void drop_messages(motet::Actions& actions) {
    const auto count = actions.items.size();
    std::vector<std::size_t> kept;
    for (std::size_t at = 0; at < count; ++at) {
        if (!is_message(actions.columns[2 * count + at])) kept.push_back(at);
    }
    if (kept.size() == count) return;
    std::vector<std::int32_t> columns;
    for (std::size_t column = 0; column < motet::num_action_fields + 1; ++column) {
        for (const auto at : kept) columns.push_back(actions.columns[column * count + at]);
    }
    std::vector<PyObject*> items;
    for (const auto at : kept) items.push_back(actions.items[at]);
    actions.columns = std::move(columns);
    actions.items = std::move(items);
}

// Makes new actions. Numbers and kinds are one object wherever they stand.
class Maker {
   public:
    Maker(nb::handle type, nb::tuple kinds) : type_(reinterpret_cast<PyTypeObject*>(type.ptr())), kinds_(kinds) {}

    nb::object make(const motet::Entry& entry) {
        auto made = nb::steal(type_->tp_alloc(type_, motet::num_action_fields));
        if (!made) throw nb::python_error();
        set(made, 0, number(entry.stage));
        set(made, 1, kinds_[entry.kind]);
        set(made, 2, number(entry.microbatch));
        set(made, 3, number(-1));
        set(made, 4, number(entry.peer));
        return made;
    }

   private:
    static void set(nb::object& made, Py_ssize_t field, nb::object value) {
        PyTuple_SET_ITEM(made.ptr(), field, value.release().ptr());
    }

    nb::object number(std::int32_t value) {
        auto& known = numbers_[value];
        if (!known.is_valid()) known = nb::int_(value);
        return known;
    }

    PyTypeObject* type_;
    nb::tuple kinds_;
    std::unordered_map<std::int32_t, nb::object> numbers_;
};

nb::object communicate(const nb::tuple& given, const nb::tuple& kinds, nb::handle type,
                       const Input<std::int32_t>& stage_rank, const Input<std::int32_t>& stage_group,
                       const Input<double>& stage_share, const Input<double>& nominal,
                       const Input<std::int32_t>& source, const Input<std::int32_t>& sink,
                       std::int32_t num_microbatches, bool held, bool at_producers) {
    nb::dict codes;
    for (std::size_t code = 0; code < kinds.size(); ++code) codes[kinds[code]] = code;
    auto actions = motet::read_actions(given, codes);
    drop_messages(actions);
    const auto count = actions.items.size();
    const auto column = [&](std::size_t at) { return std::span<const std::int32_t>(actions.columns).subspan(at * count, count); };
    const motet::Bare bare{column(0), column(1), column(2), column(3), column(4), column(5),
                           view(stage_rank), view(stage_group), view(stage_share), view(nominal), view(source),
                           view(sink), static_cast<std::int32_t>(given.size()), num_microbatches};
    std::optional<motet::Rows> rows;
    {
        nb::gil_scoped_release released;
        rows = motet::communicate(bare, held, at_producers);
    }
    if (!rows) return nb::none();
    Maker maker(type, kinds);
    auto made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(rows->size())));
    if (!made) throw nb::python_error();
    for (std::size_t rank = 0; rank < rows->size(); ++rank) {
        const auto& entries = (*rows)[rank];
        auto row = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(entries.size())));
        if (!row) throw nb::python_error();
        for (std::size_t at = 0; at < entries.size(); ++at) {
            const auto& entry = entries[at];
            auto action = entry.given >= 0 ? nb::borrow(actions.items[entry.given]) : maker.make(entry);
            PyTuple_SET_ITEM(row.ptr(), static_cast<Py_ssize_t>(at), action.release().ptr());
        }
        PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(rank), row.release().ptr());
    }
    return made;
}

}  // namespace

NB_MODULE(_communication, m) {
    m.doc() = "Native core of motet.schedule.passes.communication.";
    m.def("communicate", &communicate, nb::arg("actions"), nb::arg("kinds"), nb::arg("action"),
          nb::arg("stage_rank").noconvert(), nb::arg("stage_group").noconvert(), nb::arg("stage_share").noconvert(),
          nb::arg("nominal").noconvert(), nb::arg("source").noconvert(), nb::arg("sink").noconvert(),
          nb::arg("num_microbatches"), nb::arg("held"), nb::arg("at_producers"));
}
