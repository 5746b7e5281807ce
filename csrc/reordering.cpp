#include "reordering.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace motet {
namespace {

using Order = std::vector<std::int32_t>;  // [num_microbatches], and what stands for the whole step

// An operation: most wait for three others at most, which are read without a branch.
struct Operation {
    std::int32_t row, position, needs[3], num_more;  // more of its needs follow these
};

// What the operations of all islands have in common.
struct Operations {
    explicit Operations(const StepGraph& graph) : graph(graph) {
        const auto none = static_cast<std::int32_t>(graph.num_operations());  // has ended at 0
        for (std::int32_t operation = 0; operation < none; ++operation) {
            const auto num_needs = graph.offsets[operation + 1] - graph.offsets[operation];
            auto& each = all.emplace_back(Operation{graph.row[operation], graph.position[operation], {none, none, none},
                                                    std::max(num_needs - 3, 0)});
            std::copy_n(graph.needs.begin() + graph.offsets[operation], std::min(num_needs, 3), each.needs);
        }
        first_of.assign(graph.num_microbatches + 1, graph.num_operations());
        for (auto operation = graph.num_operations(); operation-- > 0;) {
            first_of[graph.position[operation]] = operation;
        }
        for (auto position = graph.num_microbatches - 1; position-- > 0;) {
            first_of[position] = std::min(first_of[position], first_of[position + 1]);
        }
        std::vector<bool> is_needed(graph.row.size());
        for (const auto need : graph.needs) is_needed[need] = true;
        for (std::int32_t operation = 0; operation < graph.num_operations(); ++operation) {
            if (!is_needed[operation]) last.push_back(operation);
        }
    }

    // The order of the groups of an island; the first stands for the whole step.
    Order given() const {
        Order order(graph.num_microbatches + 1);
        std::iota(order.begin(), order.end() - 1, 0);
        return order;
    }

    const StepGraph& graph;
    std::vector<Operation> all;
    std::vector<std::int32_t> last;      // the operations that none waits for
    std::vector<std::int64_t> first_of;  // for each position, the first operation of it or of a later one
};

// The ends of a step's operations, for one island at a time.
class Clock {
public:
    Clock(const Operations& operations, const Islands& islands)
        : operations_(operations),
          graph_(operations.graph),
          islands_(islands),
          num_rows_(islands.num_rows),
          table_((graph_.num_microbatches + 1) * islands.num_rows),
          ends_(graph_.row.size() + 1) {}

    void load(std::int64_t island) {
        for (std::int64_t microbatch = 0; microbatch < graph_.num_microbatches; ++microbatch) {
            const auto group = islands_.groups[island * graph_.num_microbatches + microbatch];
            std::copy_n(islands_.durations + group * num_rows_, num_rows_, table_.data() + microbatch * num_rows_);
        }
    }

    std::int64_t taken(std::int64_t operation, std::int64_t microbatch) const {
        return table_[microbatch * num_rows_ + graph_.row[operation]];
    }

    std::int64_t start(std::int64_t operation) const { return start(operations_.all[operation], operation, ends_.data()); }

    void run(const Order& order, std::int64_t first, std::int64_t stop) {
        const auto* const all = operations_.all.data();
        const auto* const table = table_.data();
        const auto* const microbatches = order.data();
        auto* const ends = ends_.data();
        const auto num_rows = num_rows_;
        for (auto operation = first; operation < stop; ++operation) {
            const auto& each = all[operation];
            ends[operation] = start(each, operation, ends) + table[microbatches[each.position] * num_rows + each.row];
        }
    }

    std::int64_t latest() const {
        std::int64_t latest = 0;
        for (const auto operation : operations_.last) latest = std::max(latest, ends_[operation]);
        return latest;
    }

    std::int64_t makespan(const Order& order) {
        run(order, 0, graph_.num_operations());
        return latest();
    }

    std::int64_t end(std::int64_t operation) const { return ends_[operation]; }

    // The sum of all rows for each microbatch.
    std::vector<std::int64_t> sizes() const {
        std::vector<std::int64_t> sizes(graph_.num_microbatches);
        for (std::size_t microbatch = 0; microbatch < sizes.size(); ++microbatch) {
            const auto row = table_.begin() + microbatch * num_rows_;
            sizes[microbatch] = std::accumulate(row, row + num_rows_, std::int64_t{0});
        }
        return sizes;
    }

    std::vector<std::int64_t>& ends() { return ends_; }

private:
    std::int64_t start(const Operation& each, std::int64_t operation, const std::int64_t* ends) const {
        auto start = std::max(std::max(ends[each.needs[0]], ends[each.needs[1]]), ends[each.needs[2]]);
        for (std::int32_t more = 0; more < each.num_more; ++more) {
            start = std::max(start, ends[graph_.needs[graph_.offsets[operation] + 3 + more]]);
        }
        return start;
    }

    const Operations& operations_;
    const StepGraph& graph_;
    const Islands& islands_;
    const std::int64_t num_rows_;
    std::vector<std::int64_t> table_;  // [num_microbatches, num_rows], and a microbatch that takes no time
    std::vector<std::int64_t> ends_;   // [num_operations], and 0
};

using Waiting = std::vector<std::pair<std::int64_t, std::int32_t>>;  // (forward of the entry, microbatch), sorted

// Takes out the microbatch whose forward is closest; the shorter, then the lower number, of two.
std::int32_t take_closest(Waiting& waiting, std::int64_t duration) {
    auto above = std::lower_bound(waiting.begin(), waiting.end(), std::pair(duration, std::int32_t{0}));
    const bool below_is_closer =
        above == waiting.end() ||
        (above != waiting.begin() && duration - (above - 1)->first <= above->first - duration);
    if (below_is_closer) {
        above = std::lower_bound(waiting.begin(), above, std::pair((above - 1)->first, std::int32_t{0}));
    }
    const auto microbatch = above->second;
    waiting.erase(above);
    return microbatch;
}

Order filled(const Operations& operations, Clock& clock, const Order& ascending) {
    const auto& graph = operations.graph;
    const auto count = graph.num_microbatches, num_last = std::min(graph.num_last, count - 1);
    Order order(count + 1, static_cast<std::int32_t>(count));  // a microbatch that takes no time
    order[0] = ascending[0];
    order[count] = 0;
    Waiting waiting;
    for (auto index = 1 + num_last; index < count; ++index) {
        waiting.emplace_back(clock.taken(graph.gaps[0], ascending[index]), ascending[index]);
    }
    std::sort(waiting.begin(), waiting.end());
    for (std::int64_t position = 1; position < count - num_last; ++position) {
        const auto* gap_of = graph.gaps.data() + 4 * position;
        const std::int64_t before = gap_of[1], backward = gap_of[2], num_forwards = gap_of[3];
        clock.run(order, operations.first_of[position - 1], std::max(before, backward) + 1);
        const std::int64_t free = before >= 0 ? clock.end(before) : 0;
        const std::int64_t gap = backward >= 0 ? std::max<std::int64_t>(clock.start(backward) - free, 0) : 0;
        order[position] = take_closest(waiting, gap / num_forwards);
    }
    for (std::int64_t index = 1; index <= num_last; ++index) order[count - index] = ascending[index];
    return order;
}

Order long_ones_early(const Operations&, Clock&, const Order& ascending) {
    Order order(ascending.rbegin(), ascending.rend());
    std::rotate(order.begin(), order.end() - 1, order.end());
    order.push_back(0);
    return order;
}

Order small_ends(const Operations& operations, Clock&, const Order& ascending) {
    const auto& gaps = operations.graph.gaps;
    std::ptrdiff_t num_first = 0;
    for (std::size_t gap = 2; gap < gaps.size(); gap += 4) num_first += gaps[gap] == gaps[2];
    Order order(ascending.begin(), ascending.begin() + num_first);
    order.insert(order.end(), ascending.rbegin(), ascending.rend() - num_first);
    order.push_back(0);
    return order;
}

Order hill(const Operations&, Clock&, const Order& ascending) {
    Order order;
    for (std::size_t index = 0; index < ascending.size(); index += 2) order.push_back(ascending[index]);
    for (auto index = ascending.size() / 2 * 2; index > 0; index -= 2) order.push_back(ascending[index - 1]);
    order.push_back(0);
    return order;
}

using Way = Order (*)(const Operations&, Clock&, const Order&);

// Makes `order`, which takes `makespan`, the first one that is no slower than the target, or else the fastest. The way
// that it was made goes to the front.
void take_fastest(const Operations& operations, Clock& clock, std::vector<Way>& ways, std::int64_t target, Order& order,
                  std::int64_t& makespan) {
    const auto sizes = clock.sizes();
    Order ascending(order.begin(), order.end() - 1);
    std::sort(ascending.begin(), ascending.end(),
              [&](auto one, auto other) { return std::pair(sizes[one], one) < std::pair(sizes[other], other); });
    auto taken = ways.end();
    for (auto way = ways.begin(); way != ways.end() && makespan > target; ++way) {
        auto found = (*way)(operations, clock, ascending);
        const auto found_makespan = clock.makespan(found);
        if (found_makespan >= makespan) continue;
        makespan = found_makespan;
        order = std::move(found);
        taken = way;
    }
    if (taken != ways.end()) std::rotate(ways.begin(), taken, taken + 1);
}

// The slowest island, and the makespan of the slowest other one.
std::pair<std::size_t, std::int64_t> slowest_two(const std::vector<std::int64_t>& makespans) {
    const auto slowest = std::max_element(makespans.begin(), makespans.end());
    std::int64_t next = 0;
    for (auto it = makespans.begin(); it != makespans.end(); ++it) {
        if (it != slowest) next = std::max(next, *it);
    }
    return {static_cast<std::size_t>(slowest - makespans.begin()), next};
}

// The positions that an island swapped last, and the swaps that it tried since one stayed.
struct Pair {
    std::int64_t i = 0, j = 0, num_tried = 0;
};

void swap_while_shorter(const Operations& operations, Clock& clock, std::vector<Order>& orders,
                        std::vector<std::int64_t>& makespans, std::int64_t num_visits) {
    const auto count = operations.graph.num_microbatches, num_operations = operations.graph.num_operations();
    std::vector<Pair> pairs(makespans.size());
    std::vector<std::int64_t> kept;
    while (!makespans.empty()) {
        const auto [island, next_slowest] = slowest_two(makespans);
        auto& order = orders[island];
        auto& makespan = makespans[island];
        auto& [i, j, num_tried] = pairs[island];
        clock.load(static_cast<std::int64_t>(island));
        clock.makespan(order);
        kept = clock.ends();
        while (num_tried < count * (count - 1) / 2 && makespan >= next_slowest) {
            if (++j == count) {
                if (++i == count - 1) i = 0;
                j = i + 1;
            }
            ++num_tried;
            const auto first = operations.first_of[i];
            num_visits -= num_operations - first;
            if (num_visits < 0) return;
            std::swap(order[i], order[j]);
            clock.run(order, first, num_operations);
            if (const auto found = clock.latest(); found < makespan) {
                makespan = found;
                num_tried = 0;
                std::copy(clock.ends().begin() + first, clock.ends().end(), kept.begin() + first);
            } else {
                std::swap(order[i], order[j]);
                std::copy(kept.begin() + first, kept.end(), clock.ends().begin() + first);
            }
        }
        if (num_tried == count * (count - 1) / 2) return;
    }
}

}  // namespace

std::vector<std::int64_t> island_makespans(const StepGraph& graph, const Islands& islands) {
    const Operations operations(graph);
    const auto given = operations.given();
    Clock clock(operations, islands);
    std::vector<std::int64_t> makespans;
    for (std::int64_t island = 0; island < islands.num_islands; ++island) {
        clock.load(island);
        makespans.push_back(clock.makespan(given));
    }
    return makespans;
}

OrderedIslands order_islands(const StepGraph& graph, const Islands& islands, std::span<const std::int64_t> given,
                             std::int64_t limit, std::int64_t num_visits) {
    const Operations operations(graph);
    Clock clock(operations, islands);
    std::vector<Order> orders(given.size(), operations.given());
    std::vector<std::int64_t> makespans(given.begin(), given.end()), slowest_first(given.size());
    std::iota(slowest_first.begin(), slowest_first.end(), 0);
    std::stable_sort(slowest_first.begin(), slowest_first.end(),
                     [&](auto one, auto other) { return given[one] > given[other]; });
    std::vector<Way> ways{small_ends, filled, long_ones_early, hill};
    std::int64_t slowest = 0;
    for (const auto island : slowest_first) {
        if (makespans[island] <= slowest || slowest >= limit || graph.num_microbatches < 2) break;
        clock.load(island);
        take_fastest(operations, clock, ways, slowest, orders[island], makespans[island]);
        slowest = std::max(slowest, makespans[island]);
    }
    const bool has_swaps = 8 * graph.num_operations() * graph.num_microbatches <= num_visits;
    if (has_swaps && slowest < limit) swap_while_shorter(operations, clock, orders, makespans, num_visits);
    OrderedIslands ordered{{}, std::move(makespans)};
    for (std::int64_t island = 0; island < islands.num_islands; ++island) {
        const auto* const groups = islands.groups + island * graph.num_microbatches;
        for (std::int64_t position = 0; position < graph.num_microbatches; ++position) {
            ordered.groups.push_back(groups[orders[island][position]]);
        }
    }
    return ordered;
}

}  // namespace motet
