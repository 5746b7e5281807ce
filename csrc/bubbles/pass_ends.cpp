#include "pass_ends.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

namespace motet {
namespace {

constexpr double kRounding = 1e-9;  // as in backbone_bubbles.py

}  // namespace

double PlacedSlices::end(double begin_s) const {
    // 1. What is left of the bubble in which begin_s lies.
    std::int64_t left = num;
    const auto next = std::upper_bound(starts.begin(), starts.end(), begin_s) - starts.begin();
    if (next > 0) {
        const double fitting = (stops[next - 1] - begin_s) / slice_s + kRounding;
        if (fitting >= static_cast<double>(left)) return begin_s + static_cast<double>(left) * slice_s;
        if (fitting >= 1) left -= static_cast<std::int64_t>(fitting);
    }
    // 2. The bubble after it that holds the last slice.
    if (left > capacity.back() - capacity[next]) throw std::out_of_range("the bubbles do not hold all slices");
    const std::int64_t before = capacity[next] + left;
    const auto bubble = std::lower_bound(capacity.begin(), capacity.end(), before) - capacity.begin() - 1;
    return starts[bubble] + static_cast<double>(before - capacity[bubble]) * slice_s;
}

void PassEnds::through(const std::vector<double>& begins_s, std::vector<double>& ends_s) const {
    for (double begin_s : begins_s) {
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
            begin_s = std::max(begin_s, ends_s[rank]);
            for (const PlacedSlices& slices : ranks_[rank]) begin_s = slices.end(begin_s);
            ends_s[rank] = begin_s;
            begin_s += send_s_;
        }
    }
}

}  // namespace motet
