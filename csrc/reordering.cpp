#include "reordering.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace motet {
namespace {

constexpr std::int64_t kNumVisits = 1 << 18;  // of a microbatch to a stage, which the swaps may simulate

using Order = std::vector<std::int64_t>;

// 1F1B, microbatch after microbatch.
class Pipeline {
public:
    explicit Pipeline(const Durations& durations)
        : durations_(durations), free_(durations.num_stages), gradient_(durations.num_stages + 1) {}

    void restart() {
        num_steps_ = 0;
        std::fill(free_.begin(), free_.end(), 0);
        std::fill(gradient_.begin(), gradient_.end(), 0);
    }

    // The next forward, if the order has one, then the backward that it makes room for, on every stage.
    void step(const Order& order) {
        const std::int64_t num_stages = durations_.num_stages, num_ordered = static_cast<std::int64_t>(order.size());
        if (num_steps_ < num_ordered) {
            const std::int64_t* forward = durations_.forward_of(order[num_steps_]);
            std::int64_t now = 0;
            for (std::int64_t stage = 0; stage < num_stages; ++stage) {
                now = free_[stage] = std::max(now, free_[stage]) + forward[stage];
            }
        }
        const std::int64_t offset = num_steps_ - (num_stages - 1);
        const std::int64_t end = std::min(num_stages, num_ordered - offset);
        for (std::int64_t stage = std::max<std::int64_t>(0, -offset); stage < end; ++stage) {
            const std::int64_t start = std::max(free_[stage], gradient_[stage + 1]);
            free_[stage] = gradient_[stage] = start + durations_.backward_of(order[offset + stage])[stage];
        }
        ++num_steps_;
    }

    std::int64_t makespan(const Order& order) {
        restart();
        const auto num_steps = static_cast<std::int64_t>(order.size()) + durations_.num_stages - 1;
        while (num_steps_ < num_steps) step(order);
        return free_[0];
    }

    // The gap before the first stage's next backward.
    std::int64_t interval() const { return std::max<std::int64_t>(gradient_[1] - free_[0], 0); }

private:
    const Durations& durations_;
    std::int64_t num_steps_ = 0;
    std::vector<std::int64_t> free_;      // when each stage has done its last action
    std::vector<std::int64_t> gradient_;  // when the last backward of each stage was done; of none at the end
};

using Waiting = std::vector<std::pair<std::int64_t, std::int64_t>>;  // (forward on the first stage, microbatch), sorted

// Takes out the microbatch whose forward is closest; the shorter, then the lower number, of two.
std::int64_t take_closest(Waiting& waiting, std::int64_t duration) {
    auto above = std::lower_bound(waiting.begin(), waiting.end(), std::pair(duration, std::int64_t{0}));
    const bool below_is_closer =
        above == waiting.end() ||
        (above != waiting.begin() && duration - (above - 1)->first <= above->first - duration);
    if (below_is_closer) {
        above = std::lower_bound(waiting.begin(), above, std::pair((above - 1)->first, std::int64_t{0}));
    }
    const std::int64_t microbatch = above->second;
    waiting.erase(above);
    return microbatch;
}

Order fill_intervals(const Durations& durations, const Order& ascending) {
    const std::int64_t num_stages = durations.num_stages;
    const auto num_last = std::min<std::int64_t>(num_stages, durations.num_microbatches);
    Waiting waiting;
    for (auto it = ascending.begin() + num_last; it < ascending.end(); ++it) {
        waiting.emplace_back(durations.forward_of(*it)[0], *it);
    }
    std::sort(waiting.begin(), waiting.end());
    Pipeline pipeline(durations);
    Order order;
    order.reserve(ascending.size());
    const auto append = [&](std::int64_t microbatch) {
        order.push_back(microbatch);
        pipeline.step(order);
    };
    const std::int64_t first = ascending[0];
    append(first);
    std::int64_t gap = 0;
    for (std::int64_t stage = 1; stage < num_stages; ++stage) {
        gap += durations.forward_of(first)[stage] + durations.backward_of(first)[stage];
    }
    for (std::int64_t missing = num_stages - 1; missing > 0 && !waiting.empty(); --missing) {
        append(take_closest(waiting, gap / missing));
        gap = std::max<std::int64_t>(gap - durations.forward_of(order.back())[0], 0);
    }
    while (!waiting.empty()) append(take_closest(waiting, pipeline.interval()));
    order.insert(order.end(), std::make_reverse_iterator(ascending.begin() + num_last),
                 std::make_reverse_iterator(ascending.begin() + 1));
    return order;
}

void swap_while_shorter(const Durations& durations, Pipeline& pipeline, Order& order) {
    const auto num_microbatches = static_cast<std::int64_t>(order.size());
    const std::int64_t visits = (num_microbatches + durations.num_stages - 1) * durations.num_stages;
    if (visits * num_microbatches > kNumVisits) return;
    std::int64_t visits_left = kNumVisits, shortest = pipeline.makespan(order);
    bool improved = true;
    while (improved) {
        improved = false;
        for (std::int64_t i = 0; i < num_microbatches; ++i) {
            for (std::int64_t j = i + 1; j < num_microbatches; ++j) {
                visits_left -= visits;
                if (visits_left < 0) return;
                std::swap(order[i], order[j]);
                const std::int64_t makespan = pipeline.makespan(order);
                if (makespan < shortest) {
                    shortest = makespan;
                    improved = true;
                } else {
                    std::swap(order[i], order[j]);
                }
            }
        }
    }
}

}  // namespace

std::int64_t pipeline_makespan(const Durations& durations, const Order& order) {
    return order.empty() ? 0 : Pipeline(durations).makespan(order);
}

Order order_microbatches(const Durations& durations) {
    Order given(durations.num_microbatches);
    std::iota(given.begin(), given.end(), 0);
    if (given.size() < 2) return given;
    std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
    for (const auto microbatch : given) {
        const std::int64_t *forward = durations.forward_of(microbatch), *backward = durations.backward_of(microbatch);
        sizes.emplace_back(std::accumulate(forward, forward + durations.num_stages, std::int64_t{0}) +
                               std::accumulate(backward, backward + durations.num_stages, std::int64_t{0}),
                           microbatch);
    }
    std::sort(sizes.begin(), sizes.end());
    Order ascending;
    for (const auto& size : sizes) ascending.push_back(size.second);
    Order longest_early(ascending.rbegin(), ascending.rend());
    std::rotate(longest_early.begin(), longest_early.end() - 1, longest_early.end());

    Pipeline pipeline(durations);
    Order best = given;
    std::int64_t shortest = pipeline.makespan(best);
    for (auto& order : {fill_intervals(durations, ascending), longest_early}) {
        const std::int64_t makespan = pipeline.makespan(order);
        if (makespan >= shortest) continue;
        shortest = makespan;
        best = order;
    }
    swap_while_shorter(durations, pipeline, best);
    return best;
}

}  // namespace motet
