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

// How many of a class a rank takes: those that come next by item number.
struct Take {
    std::int32_t rank, place, count;
};

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
    std::int64_t failed = low - 1, limit = low, step = std::max<std::int64_t>(low >> 6, 1);
    Filled best = fill(classes, num_ranks, cost, limit);
    while (best.largest < 0) {
        failed = limit;
        limit += step;
        step *= 2;
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

// Where each position goes, and each rank's items and load.
struct Batches {
    std::vector<std::int32_t> rank_of_position;
    std::vector<std::int64_t> counts, loads;
};

Batches batches_of(const Classes& classes, int num_ranks, AttentionCost cost, const std::vector<Take>& takes) {
    Batches batches{std::vector<std::int32_t>(classes.of_items.size()), std::vector<std::int64_t>(num_ranks, 0),
                    std::vector<std::int64_t>(num_ranks, 0)};
    auto next_position = classes.starts;
    std::int64_t attention = 0;
    std::int32_t rank = -1;
    for (const auto& take : takes) {
        const std::int64_t length = classes.lengths[take.place];
        if (take.rank != rank) attention = cost.quadratic * length * length;  // a rank's first item is its longest
        rank = take.rank;
        std::fill_n(batches.rank_of_position.begin() + next_position[take.place], take.count, rank);
        next_position[take.place] += take.count;
        batches.counts[rank] += take.count;
        batches.loads[rank] += take.count * (attention + cost.linear * length);
    }
    return batches;
}

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

    Batches batches{std::vector<std::int32_t>(descending.size()), std::vector<std::int64_t>(num_ranks, 0),
                    std::vector<std::int64_t>(num_ranks, 0)};
    std::vector<std::int64_t> sums(num_ranks, 0), longest(num_ranks, 0);
    const auto add = [&](std::int64_t position, std::int32_t rank) {
        batches.rank_of_position[position] = rank;
        longest[rank] = std::max(longest[rank], descending[position]);
        sums[rank] += descending[position];
        ++batches.counts[rank];
    };
    std::int64_t position = 0;
    Queue queue;
    for (std::int32_t rank = 0; rank < num_ranks && position < num_items; ++rank) {
        const std::int64_t first = descending[position];
        const std::int64_t count = first == 0 ? num_items : limit / first;
        for (const std::int64_t end = std::min(num_items, position + count); position < end; ++position) {
            add(position, rank);
        }
        queue.emplace(sums[rank], rank);
    }
    for (; position < num_items; ++position) add(position, push(queue, descending[position]).second);
    for (int rank = 0; rank < num_ranks; ++rank) {
        batches.loads[rank] =
            cost.linear * sums[rank] + cost.quadratic * batches.counts[rank] * longest[rank] * longest[rank];
    }
    return batches;
}

std::int64_t largest(const Batches& batches) { return *std::max_element(batches.loads.begin(), batches.loads.end()); }

}  // namespace

GroupedPlacement padded_attention(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic) {
    const AttentionCost cost{linear, quadratic};
    const auto classes = by_length(lengths);
    Batches batches = batches_of(classes, num_ranks, cost, {});
    std::int64_t bound = 0;
    if (!lengths.empty()) {
        const std::int64_t low = plain_bound(classes, num_ranks, cost);
        batches = batches_of(classes, num_ranks, cost, search(classes, num_ranks, cost, low).takes);
        bound = padded_attention_bound(classes, num_ranks, cost, low, largest(batches));
        if (lengths.size() <= kMaxItemsForPaper || largest(batches) > bound + bound / 64) {
            Batches by_paper = paper(classes, num_ranks, cost);
            if (largest(by_paper) < largest(batches)) batches = std::move(by_paper);
        }
    }
    return place(classes, batches.rank_of_position, batches.counts, std::move(batches.loads), bound);
}

}  // namespace motet
