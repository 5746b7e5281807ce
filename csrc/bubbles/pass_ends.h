// When passes of encoders end that are placed in bubbles, as src/motet/planner/bubble_filling/ places them; the
// contract is in src/motet/planner/bubble_filling/_pass_ends.pyi.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace motet {

// Slices of one encoder's pass on a rank, and the bubbles that hold such a slice: their starts and ends, ascending, and
// how many slices the first 0, 1, ... of them hold.
struct PlacedSlices {
    std::vector<double> starts, stops;
    std::vector<std::int64_t> capacity;
    double slice_s;
    std::int64_t num;

    // When they end if they may begin at begin_s. Throws std::out_of_range if the bubbles do not hold them.
    double end(double begin_s) const;
};

// The ranks of one encoder pipeline, in the order in which a microbatch visits them.
class PassEnds {
public:
    PassEnds(std::vector<std::vector<PlacedSlices>> ranks, double send_s) : ranks_(std::move(ranks)), send_s_(send_s) {}

    std::size_t num_ranks() const { return ranks_.size(); }

    // ends_s: [num_ranks], when the rank's last pass ends: before, and then behind microbatches that are ready at
    // begins_s, one after the other.
    void through(const std::vector<double>& begins_s, std::vector<double>& ends_s) const;

private:
    std::vector<std::vector<PlacedSlices>> ranks_;
    double send_s_;
};

}  // namespace motet
