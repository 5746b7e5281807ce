// Node-wise renaming; see src/motet/balance/reference/nodes.py.
#include "nodes.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <span>
#include <tuple>
#include <utility>

#include "wide.h"

namespace motet {
namespace {

constexpr int kVolumeBits = 24;  // squares of the volumes of 2^15 sources add up within 64 bits
constexpr int kMaxSwaps = 1000;

struct Entry {
    std::int32_t other;  // a batch, or a source
    std::int64_t volume;
};

// What is held, without the zeros.
class Volumes {
public:
    const Nodes& nodes;
    const int num_ranks;
    std::vector<std::vector<Entry>> of_source;  // most first, then by batch

    Volumes(std::span<const std::int32_t> sources, std::span<const std::int32_t> batches,
            std::span<const std::int64_t> sizes, const Nodes& nodes)
        : nodes(nodes), num_ranks(nodes.num_ranks()), of_source(num_ranks), start_(static_cast<std::size_t>(num_ranks) + 1, 0) {
        for (std::size_t item = 0; item < sizes.size(); ++item) {
            of_source[sources[item]].push_back({batches[item], sizes[item]});
        }
        for (auto& held : of_source) add_up(held);
        cut();
        group_by_batch();
        for (auto& held : of_source) {
            std::ranges::stable_sort(held, [](const Entry& a, const Entry& b) { return a.volume > b.volume; });
        }
    }
    // What the sources of a node hold of a batch.
    std::span<const Entry> in_node(int batch, int node) const {
        const std::size_t end = start_[batch + 1];
        std::size_t first = start_[batch];
        for (std::size_t count = end - first; count > 0;) {  // where the node begins, without branches to guess
            const std::size_t half = (count + 1) / 2;
            first += node_of_entry_[first + half - 1] < node ? half : 0;
            count -= half;
        }
        std::size_t last = first;
        while (last < end && node_of_entry_[last] == node) ++last;
        return {of_batch_.data() + first, of_batch_.data() + last};
    }

private:
    // One entry for each batch, in batch order.
    static void add_up(std::vector<Entry>& held) {
        std::ranges::sort(held, {}, &Entry::other);
        std::size_t count = 0;
        for (const Entry& entry : held) {
            if (count > 0 && held[count - 1].other == entry.other) {
                held[count - 1].volume += entry.volume;
            } else {
                held[count++] = entry;
            }
        }
        held.resize(count);
    }
    void cut() {
        std::int64_t most = 0;
        for (const auto& held : of_source) {
            std::int64_t sum = 0;
            for (const Entry& entry : held) sum += entry.volume;
            most = std::max(most, sum);
        }
        const int num_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(most)));
        const int shift = std::max(0, num_bits - kVolumeBits);
        for (auto& held : of_source) {
            for (Entry& entry : held) entry.volume >>= shift;
            std::erase_if(held, [](const Entry& entry) { return entry.volume == 0; });
        }
    }
    void group_by_batch() {
        for (const auto& held : of_source) {
            for (const Entry& entry : held) ++start_[entry.other + 1];
        }
        std::partial_sum(start_.begin(), start_.end(), start_.begin());
        of_batch_.resize(start_.back());
        node_of_entry_.resize(start_.back());
        auto next = start_;
        for (int source = 0; source < num_ranks; ++source) {
            for (const Entry& entry : of_source[source]) {
                const std::size_t place = next[entry.other]++;
                of_batch_[place] = {source, entry.volume};
                node_of_entry_[place] = nodes.of_rank[source];
            }
        }
    }
    std::vector<Entry> of_batch_;      // by batch, then by source
    std::vector<int> node_of_entry_;   // the nodes of these sources
    std::vector<std::size_t> start_;   // where each batch begins in of_batch_
};

// The largest of values, 0 or more: std::max_element looks at one after the other.
MOTET_WIDE std::int64_t largest_of(const std::int64_t* values, std::ptrdiff_t count) {
    std::int64_t most = 0;
    for (std::ptrdiff_t place = 0; place < count; ++place) most = std::max(most, values[place]);
    return most;
}

struct Swap {
    std::int64_t change = std::numeric_limits<std::int64_t>::max();
    int out = -1, in = -1;
};

class Renaming {
public:
    explicit Renaming(const Volumes& volumes)
        : volumes_(volumes), node_of_(volumes.num_ranks, -1), batches_(volumes.nodes.count()),
          sent_(volumes.num_ranks, 0), settled_until_(volumes.num_ranks, 0), excess_(volumes.nodes.count(), 0) {
        for (int source = 0; source < volumes.num_ranks; ++source) {
            for (const Entry& entry : volumes.of_source[source]) sent_[source] += entry.volume;
        }
    }

    // The source that sends most takes the batch of which it holds most, as long as its node has room.
    void start() {
        std::vector<std::size_t> next(volumes_.num_ranks, 0);
        std::priority_queue<std::pair<std::int64_t, int>> waiting;  // (sent, -source): of equals the first source
        for (int source = 0; source < volumes_.num_ranks; ++source) waiting.push({sent_[source], -source});
        while (!waiting.empty()) {
            const auto [sent, negated] = waiting.top();
            const int source = -negated, node = volumes_.nodes.of_rank[source];
            waiting.pop();
            if (sent != sent_[source]) {  // it sends less by now, because of its neighbours' batches
                waiting.push({sent_[source], negated});
                continue;
            }
            const auto& held = volumes_.of_source[source];
            while (next[source] < held.size() && node_of_[held[next[source]].other] >= 0) ++next[source];
            if (next[source] == held.size() || is_full(node)) continue;
            put(held[next[source]].other, node);
            waiting.push({sent_[source], negated});
        }
        int node = 0;
        for (int batch = 0; batch < volumes_.num_ranks; ++batch) {
            if (node_of_[batch] >= 0) continue;
            while (is_full(node)) ++node;
            put(batch, node);
        }
    }

    void swap_batches() {
        const int num_steps = std::min(kMaxSwaps, 100 + 40 * volumes_.num_ranks);
        auto best = node_of_;
        auto least = lower_threshold();
        for (int step = 1; step <= num_steps; ++step) {
            const int source = heaviest();
            if (sent_[source] == 0) break;  // nothing can be less
            const Swap swap = best_swap(source, step);
            if (swap.out < 0) continue;
            apply(swap);
            settled_until_[swap.out] = settled_until_[swap.in] = step + 2 + step % 4;
            if (std::pair{most_sent(), total_} >= least) continue;
            best = node_of_;
            least = lower_threshold();
        }
        node_of_ = best;
    }

    // Batches of a node in batch order.
    std::vector<std::int64_t> ranks() const {
        std::vector<std::int64_t> next(volumes_.nodes.firsts.begin(), volumes_.nodes.firsts.end()), ranks;
        for (const int node : node_of_) ranks.push_back(next[node]++);
        return ranks;
    }

private:
    bool is_full(int node) const { return static_cast<int>(batches_[node].size()) == volumes_.nodes.size(node); }
    std::int64_t most_sent() const { return largest_of(sent_.data(), std::ssize(sent_)); }
    int heaviest() const { return static_cast<int>(std::ranges::find(sent_, most_sent()) - sent_.begin()); }
    // What the sources of a node send more, or less, without, or with, the batch there.
    void send(int batch, int node, int sign) {
        for (const Entry& entry : volumes_.in_node(batch, node)) {
            sent_[entry.other] += sign * entry.volume;
            total_ += sign * entry.volume;
        }
    }
    void put(int batch, int node) {
        node_of_[batch] = node;
        batches_[node].push_back(batch);
        send(batch, node, -1);
    }
    void take(int batch) {
        std::erase(batches_[node_of_[batch]], batch);
        send(batch, node_of_[batch], 1);
    }
    void apply(const Swap& swap) {
        const int node = node_of_[swap.out], other = node_of_[swap.in];
        take(swap.out);
        take(swap.in);
        put(swap.in, node);
        put(swap.out, other);
        excess_[node] = excess_of(node);
        excess_[other] = excess_of(other);
    }
    std::pair<std::int64_t, std::int64_t> lower_threshold() {
        const std::int64_t most = most_sent();
        threshold_ = most - (most >> 7);
        for (int node = 0; node < volumes_.nodes.count(); ++node) excess_[node] = excess_of(node);
        return {most, total_};
    }
    std::int64_t square(std::int64_t sent) const {
        const std::int64_t over = std::max<std::int64_t>(0, sent - threshold_);
        return over * over;
    }
    std::int64_t excess_of(int node) const {
        const auto first = sent_.begin() + volumes_.nodes.firsts[node];
        return std::transform_reduce(first, first + volumes_.nodes.size(node), std::int64_t{0}, std::plus<>(),
                                     [&](std::int64_t sent) { return square(sent); });
    }
    // The same as a change of the sum of squares.
    std::int64_t change(int batch, int node, int sign) const {
        std::int64_t change = 0;
        for (const Entry& entry : volumes_.in_node(batch, node)) {
            change += square(sent_[entry.other] + sign * entry.volume) - square(sent_[entry.other]);
        }
        return change;
    }
    // A batch of the source's node, and one to come instead, of which the source holds more.
    Swap best_swap(int source, int step) {
        const int node = volumes_.nodes.of_rank[source];
        Swap best;
        for (const int out : batches_[node]) {
            if (settled_until_[out] >= step) continue;
            const std::int64_t before = change(out, node, 1), sent = sent_[source];
            send(out, node, 1);
            for (const Entry& held : volumes_.of_source[source]) {
                if (held.volume <= sent_[source] - sent) break;
                const int in = held.other, other = node_of_[in];
                if (other == node || settled_until_[in] >= step) continue;
                std::int64_t all = before + change(in, node, -1);
                if (all - excess_[other] > best.change) continue;  // even if the other node lost all its excess
                all += change(in, other, 1);
                send(in, other, 1);
                all += change(out, other, -1);
                send(in, other, -1);
                if (std::tie(all, out, in) < std::tie(best.change, best.out, best.in)) best = {all, out, in};
            }
            send(out, node, -1);
        }
        return best;
    }

    const Volumes& volumes_;
    std::vector<int> node_of_;               // of each batch; -1: none yet
    std::vector<std::vector<int>> batches_;  // of each node
    std::vector<std::int64_t> sent_;         // by each source
    std::vector<int> settled_until_;         // of each batch, the last step in which it stays
    std::vector<std::int64_t> excess_;       // of each node
    std::int64_t total_ = 0;                 // sent by all, less what was held in the beginning
    std::int64_t threshold_ = 0;
};

}  // namespace

Nodes::Nodes(std::span<const std::int32_t> sizes) : firsts{0} {
    for (const auto size : sizes) {
        of_rank.insert(of_rank.end(), size, count());
        firsts.push_back(firsts.back() + size);
    }
}

std::vector<std::int64_t> place_on_nodes(std::span<const std::int32_t> sources, std::span<const std::int32_t> batches,
                                         std::span<const std::int64_t> sizes, const Nodes& nodes) {
    const Volumes volumes(sources, batches, sizes, nodes);
    Renaming renaming(volumes);
    renaming.start();
    renaming.swap_batches();
    return renaming.ranks();
}

}  // namespace motet
