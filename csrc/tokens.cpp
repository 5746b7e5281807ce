// Pairs per block from a table of segments; see src/motet/balance/reference/tokens.py.
#include "tokens.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace motet {
namespace {

// The pairs of the j-th token of a segment are first + slope * j.
struct Series {
    std::int64_t first, slope;
};

// Tokens seen so far of each modality of the current document.
class Seen {
public:
    void enter(std::int64_t document) {
        if (document == document_) return;
        document_ = document;
        present_ = 0;
    }
    std::int64_t of(std::uint64_t modalities) const {
        std::int64_t sum = 0;
        for (auto rest = modalities & present_; rest != 0; rest &= rest - 1) sum += count_[std::countr_zero(rest)];
        return sum;
    }
    void add(std::int64_t modality, std::int64_t tokens) {
        const auto bit = std::uint64_t{1} << modality;
        count_[modality] = tokens + (present_ & bit ? count_[modality] : 0);
        present_ |= bit;
    }

private:
    std::int64_t document_ = -1;
    std::uint64_t present_ = 0;  // modalities whose count is of this document
    std::array<std::int64_t, 64> count_{};
};

// Tokens [from, to) of a segment.
std::int64_t sum_of(const Series& series, std::int64_t from, std::int64_t to) {
    return (to - from) * series.first + series.slope * ((to - from) * (from + to - 1) / 2);
}

}  // namespace

std::vector<std::int64_t> block_pairs(const SegmentTable& segments, std::int64_t block) {
    const std::size_t num_segments = segments.length.size();
    std::vector<std::int64_t> in_all(num_segments + 1, 0), seen_of_instance(num_segments + 1, 0);
    std::int64_t num_tokens = 0;
    for (std::size_t i = 0; i < num_segments; ++i) {
        in_all[segments.instance[i]] += segments.length[i];
        num_tokens += segments.length[i];
    }
    std::vector<std::int64_t> pairs((num_tokens + block - 1) / block, 0);
    Seen seen;
    std::int64_t place = 0, left = block;  // the block that the next token goes to, and its tokens still to come
    for (std::size_t i = 0; i < num_segments; ++i) {
        const auto length = segments.length[i], modality = segments.modality[i], instance = segments.instance[i];
        const auto attends_to = static_cast<std::uint64_t>(segments.attends_to[i]);
        const std::int64_t sees_own = attends_to >> modality & 1;
        seen.enter(segments.document[i]);
        Series series{seen.of(attends_to) + 1, sees_own};
        if (instance != 0) series = {series.first - 1 + in_all[instance] - sees_own * seen_of_instance[instance], 0};
        for (std::int64_t done = 0; done < length;) {
            const std::int64_t end = done + std::min(left, length - done);
            pairs[place] += sum_of(series, done, end);
            left -= end - done;
            done = end;
            if (left == 0) {
                ++place;
                left = block;
            }
        }
        seen.add(modality, length);
        seen_of_instance[instance] += length;
    }
    return pairs;
}

}  // namespace motet
