#include "cuts.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace motet {
namespace {

using Ticks = std::int64_t;
using Column = std::vector<Ticks>;

constexpr Ticks kNever = Ticks{1} << 61;

// The least limit such that num_stages stages, each filled up to it, hold all layers.
Ticks slowest_of_best(std::span<const Ticks> sums, std::int64_t num_stages) {
    Ticks longest = 0;
    for (std::size_t layer = 1; layer < sums.size(); ++layer) longest = std::max(longest, sums[layer] - sums[layer - 1]);
    Ticks low = std::max((sums.back() + num_stages - 1) / num_stages, longest), high = low + longest;
    while (low < high) {
        const Ticks limit = (low + high) / 2;
        auto stop = sums.begin();
        for (std::int64_t stage = 0; stage < num_stages; ++stage) {
            stop = std::upper_bound(stop, sums.end(), *stop + limit) - 1;
        }
        if (stop == sums.end() - 1) {
            high = limit;
        } else {
            low = limit + 1;
        }
    }
    return low;
}

// Bounds of the stages with the least sum of squares, none of them slower than `slowest`: the last stage as short as
// can be, then the first, the second ...
Column least_squares(std::span<const Ticks> sums, std::int64_t num_stages, Ticks slowest) {
    const auto num = static_cast<std::int64_t>(sums.size());
    const auto square = [&](std::int64_t start, std::int64_t stop) {
        const Ticks span = sums[stop] - sums[start];
        return span > slowest ? kNever : span * span;
    };
    // tables[m][l]: the least sum of the first l layers in m + 1 stages.
    std::vector<Column> tables(num_stages, Column(num, kNever));
    for (std::int64_t stop = 1; stop < num; ++stop) tables[0][stop] = square(0, stop);
    for (std::int64_t stage = 1; stage < num_stages; ++stage) {
        const Column& before = tables[stage - 1];
        for (std::int64_t stop = 1; stop < num; ++stop) {
            Ticks least = kNever;
            for (std::int64_t start = stop - 1; start >= 0 && sums[stop] - sums[start] <= slowest; --start) {
                const Ticks span = sums[stop] - sums[start];
                least = std::min(least, before[start] + span * span);
            }
            tables[stage][stop] = least;
        }
    }
    Column bounds{num - 1};
    for (std::int64_t stage = num_stages - 1; stage > 0; --stage) {
        const std::int64_t stop = bounds.back();
        const auto is_best = [&](std::int64_t start) {
            return tables[stage - 1][start] + square(start, stop) == tables[stage][stop];
        };
        std::int64_t start = stage == num_stages - 1 ? stop - 1 : 0;
        while (!is_best(start)) start += stage == num_stages - 1 ? -1 : 1;
        bounds.push_back(start);
    }
    bounds.push_back(0);
    std::reverse(bounds.begin(), bounds.end());
    return bounds;
}

struct Move {
    std::int64_t first = -1, last = -1;
    bool forward = false;
    Ticks largest = 0, square = 0;
};

// What the devices come to: the slowest, then the sum of squares.
void rate(const Column& device_s, Move& move) {
    move.largest = 0, move.square = 0;
    for (const Ticks seconds : device_s) {
        move.largest = std::max(move.largest, seconds);
        move.square += seconds * seconds;
    }
}

// The best move, the first of equal ones in the order of stages, forward before backward; first is -1 if none helps.
Move best_move(const Column& bounds, std::span<const Ticks> sums, const Column& device, Ticks slowest,
               const Column& device_s) {
    const auto num = static_cast<std::int64_t>(device.size());
    const auto stage_s = [&](std::int64_t stage) { return sums[bounds[stage + 1]] - sums[bounds[stage]]; };
    // Of the layer that passes a boundary (between stage `boundary` - 1 and the next one).
    const auto passed_s = [&](std::int64_t boundary, bool forward) {
        const std::int64_t layer = bounds[boundary] - forward;
        return sums[layer + 1] - sums[layer];
    };
    Move best;
    rate(device_s, best);
    Column moved_s[2];
    for (std::int64_t first = 0; first < num; ++first) {
        bool goes_on[2] = {true, true};  // no inner stage exceeds `slowest` so far
        moved_s[0] = moved_s[1] = device_s;
        for (std::int64_t last = first + 1; last < num && (goes_on[0] || goes_on[1]); ++last) {
            for (const bool forward : {true, false}) {
                if (!goes_on[forward]) continue;
                const Ticks sign = forward ? -1 : 1;
                const Ticks passed = sign * passed_s(last, forward);
                if (last > first + 1) {
                    const Ticks before = sign * passed_s(last - 1, forward);
                    if (stage_s(last - 1) + passed - before > slowest) {
                        goes_on[forward] = false;
                        continue;
                    }
                }
                Column& after_s = moved_s[forward];
                after_s[device[last - 1]] += passed;
                after_s[device[last]] -= passed;
                const std::int64_t giver = forward ? first : last;
                if (bounds[giver + 1] - bounds[giver] <= 1) continue;
                const Ticks of_first = stage_s(first) + sign * passed_s(first + 1, forward);
                if (std::max(of_first, stage_s(last) - passed) > slowest) continue;
                Move move{first, last, forward};
                rate(after_s, move);
                if (move.largest < best.largest || (move.largest == best.largest && move.square < best.square)) {
                    best = move;
                }
            }
        }
    }
    return best;
}

// Moves of single layers between stages, always the best next, until none makes the devices more even.
void even_devices(Column& bounds, std::span<const Ticks> sums, std::int64_t num_devices, Ticks slowest, bool folded) {
    Column device(bounds.size() - 1), device_s(num_devices, 0);
    for (std::size_t stage = 0; stage < device.size(); ++stage) {
        const auto chunk = static_cast<std::int64_t>(stage) / num_devices;
        const auto place = static_cast<std::int64_t>(stage) % num_devices;
        device[stage] = folded && chunk % 2 == 1 ? num_devices - 1 - place : place;
    }
    while (true) {
        std::fill(device_s.begin(), device_s.end(), 0);
        for (std::size_t stage = 0; stage < device.size(); ++stage) {
            device_s[device[stage]] += sums[bounds[stage + 1]] - sums[bounds[stage]];
        }
        const Move move = best_move(bounds, sums, device, slowest, device_s);
        if (move.first < 0) return;
        for (std::int64_t bound = move.first + 1; bound <= move.last; ++bound) bounds[bound] += move.forward ? -1 : 1;
    }
}

}  // namespace

std::vector<std::int64_t> best_cut(std::span<const std::int64_t> sums, std::int64_t num_devices,
                                   std::int64_t num_chunks, bool folded) {
    const std::int64_t num_stages = num_devices * num_chunks;
    const Ticks slowest = slowest_of_best(sums, num_stages);
    Column bounds = least_squares(sums, num_stages, slowest);
    if (num_chunks > 1) even_devices(bounds, sums, num_devices, slowest, folded);
    return bounds;
}

void slowest_stages(std::span<const double> sums, double* slowest) {
    const std::size_t num = sums.size() - 1;
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    // best[stop]: the slowest stage of the best cut of the first `stop` blocks into as many stages as so far.
    std::vector<double> best(num + 1), next(num + 1, kInfinite);
    best[0] = kInfinite;
    for (std::size_t stop = 1; stop <= num; ++stop) best[stop] = sums[stop] - sums[0];
    slowest[0] = best[num];
    for (std::size_t stages = 2; stages <= num; ++stages) {
        for (std::size_t stop = 1; stop <= num; ++stop) {
            double least = kInfinite;
            // A last stage of more blocks takes no less, so none beyond one that takes as long as the best is better.
            for (std::size_t start = stop; start-- > 0;) {
                const double span = sums[stop] - sums[start];
                if (span >= least) break;
                least = std::min(least, std::max(best[start], span));
            }
            next[stop] = least;
        }
        std::swap(best, next);
        best[0] = kInfinite;
        slowest[stages - 1] = best[num];
    }
}

}  // namespace motet
