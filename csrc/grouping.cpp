#include "grouping.h"

#include <algorithm>
#include <utility>

namespace motet {
namespace {

// splitmix64: the same sequence here and in the reference, on every machine.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // In 0 .. count - 1.
    std::uint64_t below(std::uint64_t count) {
        state_ += 0x9E3779B97F4A7C15;
        std::uint64_t bits = state_;
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
        bits ^= bits >> 31;
        return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits) * count) >> 64);
    }

private:
    std::uint64_t state_;
};

void shuffle(std::vector<std::int32_t>& samples, Random& random) {
    for (std::size_t i = samples.size(); i > 1; --i) std::swap(samples[i - 1], samples[random.below(i)]);
}

// Side by side, so that a sample out of order costs one wait for memory, not two.
struct Size {
    std::int64_t vision, text;
};

// Samples ahead whose sizes are fetched while others are added up.
constexpr std::size_t kAhead = 24;

void close_group(SampleGroups& groups) { groups.offsets.push_back(static_cast<std::int64_t>(groups.items.size())); }

}  // namespace

SampleGroups isf(std::span<const std::int64_t> vision, std::span<const std::int64_t> text, const GroupLimits& limits,
                 int num_iterations, std::uint64_t seed) {
    SampleGroups groups;
    groups.items.reserve(vision.size());
    groups.offsets.push_back(0);
    std::vector<std::int32_t> left, oversized;
    std::vector<Size> sizes(vision.size());
    for (std::size_t sample = 0; sample < vision.size(); ++sample) {
        const bool is_oversized = vision[sample] > limits.max_vision || text[sample] > limits.max_text;
        (is_oversized ? oversized : left).push_back(static_cast<std::int32_t>(sample));
        sizes[sample] = {vision[sample], text[sample]};
    }
    Random random(seed);
    std::vector<std::int32_t> rejected;
    std::vector<std::size_t> ends;  // of the rejected groups
    for (int iteration = 0; iteration < num_iterations && !left.empty(); ++iteration) {
        shuffle(left, random);
        rejected.clear();
        ends.clear();
        Size total{0, 0};
        std::size_t first = 0;
        const auto end_group = [&](std::size_t end) {
            if (total.vision >= limits.min_vision || total.text >= limits.min_text) {
                groups.items.insert(groups.items.end(), left.begin() + first, left.begin() + end);
                close_group(groups);
            } else {
                rejected.insert(rejected.end(), left.begin() + first, left.begin() + end);
                ends.push_back(rejected.size());
            }
            first = end;
            total = {0, 0};
        };
        for (std::size_t i = 0; i < left.size(); ++i) {
            __builtin_prefetch(&sizes[left[std::min(i + kAhead, left.size() - 1)]]);
            const Size size = sizes[left[i]];
            if (size.vision > limits.max_vision - total.vision || size.text > limits.max_text - total.text) end_group(i);
            total.vision += size.vision;
            total.text += size.text;
        }
        end_group(left.size());
        left.swap(rejected);
    }
    groups.num_full = static_cast<std::int64_t>(groups.offsets.size()) - 1;
    groups.num_oversized = static_cast<std::int64_t>(oversized.size());
    for (const auto sample : oversized) {
        groups.items.push_back(sample);
        close_group(groups);
    }
    std::size_t first = 0;
    for (const auto end : left.empty() ? std::vector<std::size_t>{} : ends) {
        groups.items.insert(groups.items.end(), left.begin() + first, left.begin() + end);
        close_group(groups);
        first = end;
    }
    return groups;
}

}  // namespace motet
