// Only attention pads; see src/motet/balance/reference/padded_attention.py.
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "padded_attention.h"

namespace motet {
namespace {

// With more items the paper's batches are tried only where these end more than a 64th above the bound.
constexpr std::size_t kMaxItemsForPaper = 1 << 14;

struct Filled {
    std::vector<Take> takes;
    std::int64_t largest = 0;  // load; -1 where not all items find a place
};

// Classes that have items left; chains of empty ones are halved on the way.
class Left {
public:
    explicit Left(const Classes& classes) : counts(classes.lengths.size()), skip_(classes.lengths.size() + 1) {
        for (std::size_t c = 0; c < counts.size(); ++c) counts[c] = classes.starts[c + 1] - classes.starts[c];
        std::iota(skip_.begin(), skip_.end(), 0);
    }
    std::int32_t next(std::int32_t place) {
        while (skip_[place] != place) place = skip_[place] = skip_[skip_[place]];
        return place;
    }
    void take(std::int32_t place, std::int32_t count) {
        counts[place] -= count;
        if (counts[place] == 0) skip_[place] = place + 1;
    }
    std::vector<std::int32_t> counts;

private:
    std::vector<std::int32_t> skip_;
};

Filled fill(const Classes& classes, int num_ranks, AttentionCost cost, std::int64_t limit) {
    const auto& lengths = classes.lengths;
    const auto num_classes = static_cast<std::int32_t>(lengths.size());
    Left left(classes);
    Filled filled;
    std::int32_t top = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
        top = left.next(top);
        if (top == num_classes) break;
        const std::int64_t attention = cost.quadratic * lengths[top] * lengths[top];
        std::int64_t room = limit;
        for (std::int32_t place = top; place < num_classes;) {
            const std::int64_t price = attention + cost.linear * lengths[place];
            std::int64_t count = left.counts[place];
            if (count * price > room) count = room / price;
            filled.takes.push_back({rank, place, static_cast<std::int32_t>(count)});
            room -= count * price;
            left.take(place, static_cast<std::int32_t>(count));
            if (room < attention) break;
            place = left.next(place + 1);
            if (place == num_classes || cost.linear * lengths[place] <= room - attention) continue;
            const std::int64_t longest = (room - attention) / cost.linear;
            const auto fitting = std::lower_bound(lengths.begin() + place, lengths.end(), longest, std::greater<>());
            place = left.next(static_cast<std::int32_t>(fitting - lengths.begin()));
        }
        filled.largest = std::max(filled.largest, limit - room);
    }
    if (left.next(top) != num_classes) filled.largest = -1;
    return filled;
}

std::int64_t plain_bound(const Classes& classes, int num_ranks, AttentionCost cost) {
    std::int64_t total = 0;
    for (std::size_t c = 0; c < classes.lengths.size(); ++c) {
        total += (classes.starts[c + 1] - classes.starts[c]) * cost.alone(classes.lengths[c]);
    }
    const std::int64_t mean = total / num_ranks + (total % num_ranks != 0);
    return std::max(mean, cost.alone(classes.lengths[0]));
}

// Under the smallest limit that was found to suffice.
Filled search(const Classes& classes, int num_ranks, AttentionCost cost, std::int64_t low) {
    const std::int64_t first_step = std::max<std::int64_t>(low >> 6, 1);
    std::int64_t failed = low - 1, limit = low;
    Filled best = fill(classes, num_ranks, cost, limit);
    while (best.largest < 0) {
        failed = limit;
        limit += std::min(limit - low + first_step, INT64_MAX - limit);  // twice as far from low
        best = fill(classes, num_ranks, cost, limit);
    }
    while (best.largest - failed > std::max<std::int64_t>(low >> 10, 1)) {
        const std::int64_t middle = failed + (best.largest - failed) / 2;
        Filled filled = fill(classes, num_ranks, cost, middle);
        if (filled.largest < 0) {
            failed = middle;
        } else {
            best = std::move(filled);
        }
    }
    return best;
}

struct Batches {
    std::vector<Take> takes;
    std::vector<std::int64_t> loads;  // [num_ranks]

    Batches(const Classes& classes, int num_ranks, AttentionCost cost, std::vector<Take>&& taken)
        : takes(std::move(taken)), loads(num_ranks, 0) {
        std::vector<std::int64_t> longest(num_ranks, -1);  // a rank's first item is its longest
        for (const auto& take : takes) {
            const std::int64_t length = classes.lengths[take.place];
            if (longest[take.rank] < 0) longest[take.rank] = length;
            const std::int64_t attention = cost.quadratic * longest[take.rank] * longest[take.rank];
            loads[take.rank] += take.count * (attention + cost.linear * length);
        }
    }
    std::int64_t largest() const { return loads.empty() ? 0 : *std::max_element(loads.begin(), loads.end()); }
};

// OrchMLLM Algorithm 5, corrected.
Batches paper(const Classes& classes, int num_ranks, AttentionCost cost) {
    using Sum = std::pair<std::int64_t, std::int32_t>;  // of lengths, and the rank
    using Queue = std::priority_queue<Sum, std::vector<Sum>, std::greater<>>;
    std::vector<std::int64_t> descending;
    for (std::size_t c = 0; c < classes.lengths.size(); ++c) {
        descending.insert(descending.end(), classes.starts[c + 1] - classes.starts[c], classes.lengths[c]);
    }
    const auto num_items = static_cast<std::int64_t>(descending.size());
    const auto push = [](Queue& queue, std::int64_t length) {
        Sum sum = queue.top();
        queue.pop();
        sum.first += length;
        queue.push(sum);
        return sum;
    };
    Queue plain;
    for (int rank = 0; rank < num_ranks; ++rank) plain.emplace(0, rank);
    std::int64_t limit = 0;
    for (const auto length : descending) limit = std::max(limit, push(plain, length).first);

    std::vector<Take> takes;
    std::vector<std::int64_t> sums(num_ranks, 0);
    std::int32_t place = 0;  // the class of the position
    std::int64_t position = 0;
    const auto take_next = [&](std::int32_t rank) {
        while (position == classes.starts[place + 1]) ++place;
        takes.push_back({rank, place, 1});
        sums[rank] += classes.lengths[place];
        ++position;
    };
    Queue queue;
    for (std::int32_t rank = 0; rank < num_ranks && position < num_items; ++rank) {
        const std::int64_t first = descending[position];
        const std::int64_t end = first == 0 ? num_items : std::min(num_items, position + limit / first);
        while (position < end) take_next(rank);
        queue.emplace(sums[rank], rank);
    }
    while (position < num_items) take_next(push(queue, descending[position]).second);
    return {classes, num_ranks, cost, std::move(takes)};
}

}  // namespace

GroupedPlacement padded_attention(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic) {
    const AttentionCost cost{linear, quadratic};
    const auto classes = by_length(lengths);
    if (lengths.empty()) return place(classes, {}, std::vector<std::int64_t>(num_ranks, 0), 0);
    const std::int64_t low = plain_bound(classes, num_ranks, cost);
    Batches batches(classes, num_ranks, cost, search(classes, num_ranks, cost, low).takes);
    const std::int64_t bound = padded_attention_bound(classes, num_ranks, cost, low, batches.largest());
    if (lengths.size() <= kMaxItemsForPaper || batches.largest() > bound + bound / 64) {
        Batches by_paper = paper(classes, num_ranks, cost);
        if (by_paper.largest() < batches.largest()) batches = std::move(by_paper);
    }
    return place(classes, batches.takes, std::move(batches.loads), bound);
}

}  // namespace motet
