// Each stream runs its actions in order until one must wait; the stream is then parked at the operation that it waits
// for, and goes on when that has ended. A start is the largest of ends, so the order in which streams are taken up
// changes nothing.
#include "engine.h"

#include <algorithm>
#include <limits>

namespace motet {
namespace {

constexpr std::int32_t none = -1;
constexpr double never = -1.0;

// Places of `keys` grouped by key, in order: group k is items[offsets[k]] ... items[offsets[k + 1] - 1].
struct Grouped {
    std::vector<std::int32_t> items;
    std::vector<std::int64_t> offsets;

    Grouped(std::span<const std::int32_t> keys, std::size_t num_keys, std::span<const std::int32_t> values)
        : items(keys.size()), offsets(num_keys + 1, 0) {
        for (const auto key : keys) ++offsets[key + 1];
        for (std::size_t key = 0; key < num_keys; ++key) offsets[key + 1] += offsets[key];
        auto next = offsets;
        for (std::size_t at = 0; at < keys.size(); ++at) {
            items[next[keys[at]]++] = values.empty() ? static_cast<std::int32_t>(at) : values[at];
        }
    }
};

struct Operation {
    double start = 0.0, seconds = 0.0, end = never;
    std::int32_t absent = 0;       // streams that have not reached it
    std::int32_t waiting = none;   // the stream parked here last
};

struct Stream {
    std::int64_t at, stop;         // its next action, among those of all streams
    std::int64_t needs = 0;        // the next dependency of that action to look at
    double free = 0.0;             // when all that the action has been found to wait for has ended
    std::int32_t next_waiting = none;
    bool arrived = false;          // at its operation, which others have not reached
};

class Engine {
   public:
    Engine(std::span<const std::int32_t> stream, std::span<const std::int32_t> operation,
           std::span<const double> seconds, std::span<const std::int32_t> dependent,
           std::span<const std::int32_t> dependency)
        : operation_(operation),
          needs_(dependent, stream.size(), dependency),
          order_(stream, stream.empty() ? 0 : 1 + *std::max_element(stream.begin(), stream.end()), {}),
          operations_(stream.size()) {
        for (std::size_t action = 0; action < operation.size(); ++action) {
            auto& shared = operations_[operation[action]];
            ++shared.absent;
            shared.seconds = std::max(shared.seconds, seconds[action]);
        }
        for (std::size_t at = 0; at + 1 < order_.offsets.size(); ++at) {
            streams_.push_back({order_.offsets[at], order_.offsets[at + 1]});
            ready_.push_back(static_cast<std::int32_t>(at));
            look_at_next(streams_.back());
        }
    }

    Times run() {
        while (!ready_.empty()) {
            const auto stream = ready_.back();
            ready_.pop_back();
            advance(stream);
        }
        Times times;
        times.start.reserve(operation_.size());
        times.end.reserve(operation_.size());
        for (const auto of : operation_) {
            const auto& done = operations_[of];
            const bool ran = done.end != never;
            times.start.push_back(ran ? done.start : std::numeric_limits<double>::quiet_NaN());
            times.end.push_back(ran ? done.end : std::numeric_limits<double>::quiet_NaN());
        }
        return times;
    }

   private:
    void look_at_next(Stream& stream) {
        if (stream.at < stream.stop) stream.needs = needs_.offsets[order_.items[stream.at]];
    }

    void park(std::int32_t number, Operation& operation) {
        streams_[number].next_waiting = operation.waiting;
        operation.waiting = number;
    }

    void leave(Stream& stream, const Operation& operation) {
        stream.free = operation.end;
        stream.arrived = false;
        ++stream.at;
        look_at_next(stream);
    }

    void wake(Operation& operation) {
        for (auto number = operation.waiting; number != none;) {
            auto& stream = streams_[number];
            ready_.push_back(number);
            number = stream.next_waiting;
            if (stream.arrived) leave(stream, operation);
        }
        operation.waiting = none;
    }

    void advance(std::int32_t number) {
        auto& stream = streams_[number];
        while (stream.at < stream.stop) {
            const auto action = order_.items[stream.at];
            for (const auto stop = needs_.offsets[action + 1]; stream.needs < stop; ++stream.needs) {
                auto& needed = operations_[needs_.items[stream.needs]];
                if (needed.end == never) return park(number, needed);
                stream.free = std::max(stream.free, needed.end);
            }
            auto& operation = operations_[operation_[action]];
            operation.start = std::max(operation.start, stream.free);
            if (--operation.absent > 0) {
                stream.arrived = true;
                return park(number, operation);
            }
            operation.end = operation.start + operation.seconds;
            wake(operation);
            leave(stream, operation);
        }
    }

    std::span<const std::int32_t> operation_;
    Grouped needs_, order_;
    std::vector<Operation> operations_;
    std::vector<Stream> streams_;
    std::vector<std::int32_t> ready_;
};

}  // namespace

Times run(std::span<const std::int32_t> stream, std::span<const std::int32_t> operation, std::span<const double> seconds,
          std::span<const std::int32_t> dependent, std::span<const std::int32_t> dependency) {
    return Engine(stream, operation, seconds, dependent, dependency).run();
}

}  // namespace motet
