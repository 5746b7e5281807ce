// 1. What each action waits for (src/motet/schedule/dependencies.py). 2. A dry run, in nominal durations
// (src/motet/schedule/check/dry_run.py). 3. Messages in the order in which their consumers start, or their producers end.
#include "communication.h"

#include <array>
#include <map>
#include <utility>

#include "action_groups.h"

namespace motet {
namespace {

constexpr std::int32_t prefetch_depth = 1;

bool is_collective(std::int32_t kind) { return kind >= EXCHANGE_F && kind <= NORM; }

class DryRun {
   public:
    DryRun(const Bare& bare, const ActionGroups& groups, bool held) : bare_(bare), groups_(groups) {
        number_events();
        link_edges();
        for (std::int32_t action = 0; action < static_cast<std::int32_t>(bare.kind.size()); ++action) {
            add_dependencies(action);
            add_stream(action, held);
        }
    }

    // False where an action waits for one that is not there, or actions wait for each other.
    bool run() {
        if (lacks_) return false;
        const auto num_events = static_cast<std::int32_t>(duration_.size());
        std::vector<std::int64_t> offset(num_events + 1, 0);
        std::vector<std::int32_t> waiting(num_events, 0), after(waits_.size()), ready;
        for (const auto& [before, event] : waits_) ++offset[before + 1], ++waiting[event];
        for (std::int32_t event = 0; event < num_events; ++event) offset[event + 1] += offset[event];
        auto next = offset;
        for (const auto& [before, event] : waits_) after[next[before]++] = event;
        start_.assign(num_events, 0.0);
        end_ = duration_;
        for (std::int32_t event = 0; event < num_events; ++event) {
            if (waiting[event] == 0) ready.push_back(event);
        }
        for (std::size_t done = 0; done < ready.size(); ++done) {
            const auto event = ready[done];
            end_[event] += start_[event];
            for (auto at = offset[event]; at < offset[event + 1]; ++at) {
                start_[after[at]] = std::max(start_[after[at]], end_[event]);
                if (--waiting[after[at]] == 0) ready.push_back(after[at]);
            }
        }
        return ready.size() == duration_.size();
    }

    double start(std::int32_t action) const { return start_[event_[action]]; }
    double end(std::int32_t action) const { return end_[event_[action]]; }

   private:
    void number_events() {
        std::map<std::array<std::int32_t, 5>, std::int32_t> joint;
        for (std::size_t action = 0; action < bare_.kind.size(); ++action) {
            const auto kind = bare_.kind[action], stage = bare_.stage[action], group = bare_.stage_group[stage];
            const auto number = static_cast<std::int32_t>(duration_.size());
            auto event = number;
            if (is_collective(kind) && group >= 0) {
                const auto peer = bare_.peer[action] < 0 ? none : bare_.stage_group[bare_.peer[action]];
                const std::array<std::int32_t, 5> key{kind, group, bare_.microbatch[action], bare_.part[action], peer};
                event = joint.try_emplace(key, number).first->second;
            }
            event_.push_back(event);
            if (event != number) continue;
            const auto num_parts = groups_.of(stage, kind, bare_.microbatch[action]).size();
            const auto share = kind == STEP ? 1.0 : bare_.stage_share[stage];
            duration_.push_back(bare_.nominal[kind] * share / static_cast<double>(num_parts));
        }
    }

    void link_edges() {
        sources_.resize(bare_.stage_rank.size());
        sinks_.resize(bare_.stage_rank.size());
        for (std::size_t edge = 0; edge < bare_.source.size(); ++edge) {
            sources_[bare_.sink[edge]].push_back(bare_.source[edge]);
            sinks_[bare_.source[edge]].push_back(bare_.sink[edge]);
        }
    }

    // A stream takes its actions in order.
    void add_stream(std::int32_t action, bool held) {
        const auto rank = bare_.rank[action];
        if (rank != at_rank_) last_compute_ = last_collective_ = none, at_rank_ = rank;
        auto& last = is_collective(bare_.kind[action]) && !held ? last_collective_ : last_compute_;
        if (last != none) waits_.emplace_back(last, event_[action]);
        last = event_[action];
    }

    void need(std::int32_t needed, bool must_exist = false) {
        if (needed != none) waits_.emplace_back(event_[needed], event_[of_]);
        lacks_ |= must_exist && needed == none;
    }

    void add_dependencies(std::int32_t action) {
        of_ = action;
        const auto stage = bare_.stage[action], kind = bare_.kind[action], microbatch = bare_.microbatch[action];
        const auto part = bare_.part[action];
        const bool is_first = part == bare_.part[groups_.of(stage, kind, microbatch).front()];
        if (kind <= R && !is_first) need(groups_.find(stage, kind, microbatch, part - 1), true);
        switch (kind) {
            case F:
                if (is_first) add_inputs(stage, microbatch);
                add_gathers(GATHER, stage, microbatch, part);
                break;
            case R:
                if (is_first) need(groups_.last(stage, F, microbatch));
                break;
            case B:
            case I: {
                if (is_first) add_gradients(stage, microbatch);
                const auto num_parts = static_cast<std::int32_t>(groups_.of(stage, kind, microbatch).size());
                add_gathers(GATHER_B, stage, microbatch, part >= 0 ? num_parts - 1 - part : none);
                break;
            }
            case W:
                need(groups_.last(stage, I, microbatch));
                break;
            case EXCHANGE_F:
                need(groups_.last(stage, F, microbatch));
                break;
            case EXCHANGE_B:
                if (bare_.peer[action] >= 0) add_backward(bare_.peer[action], microbatch);
                break;
            case GATHER:
                add_freed(stage, F, microbatch, part - 1 - prefetch_depth);
                break;
            case GATHER_B:
                for (const auto backward : {B, I}) {
                    const auto num_parts = static_cast<std::int32_t>(groups_.of(stage, backward, microbatch).size());
                    if (part >= 0) add_freed(stage, backward, microbatch, num_parts - part - 2 - prefetch_depth);
                }
                break;
            case REDUCE:
                for (const auto backward : {B, W}) add_reduced(stage, backward, microbatch, part);
                break;
            case NORM:
                add_whole_step({F, B, W, REDUCE});
                break;
            case STEP:
                add_whole_step({B, W, REDUCE, NORM});
                break;
        }
    }

    void add_inputs(std::int32_t stage, std::int32_t microbatch) {
        for (const auto source : sources_[stage]) {
            const auto exchanged = groups_.find(source, EXCHANGE_F, microbatch, none, stage);
            need(exchanged != none ? exchanged : groups_.last(source, F, microbatch));
        }
    }

    void add_gradients(std::int32_t stage, std::int32_t microbatch) {
        need(groups_.last(stage, F, microbatch));
        need(groups_.last(stage, R, microbatch));
        for (const auto sink : sinks_[stage]) {
            const auto exchanged = groups_.find(stage, EXCHANGE_B, microbatch, none, sink);
            if (exchanged != none) need(exchanged);
            else add_backward(sink, microbatch);
        }
    }

    void add_backward(std::int32_t stage, std::int32_t microbatch) {
        need(groups_.last(stage, B, microbatch));
        need(groups_.last(stage, I, microbatch));
    }

    void add_gathers(Kind kind, std::int32_t stage, std::int32_t microbatch, std::int32_t slice) {
        for (const auto of : {microbatch, none}) {
            for (const auto gathered : {slice, none}) need(groups_.find(stage, kind, of, gathered));
        }
    }

    void add_freed(std::int32_t stage, Kind kind, std::int32_t microbatch, std::int32_t part) {
        if (part >= 0) need(groups_.find(stage, kind, microbatch, part));
    }

    // The last parts that add to a gradient: of one microbatch or all (-1), of one slice or all (-1).
    void add_reduced(std::int32_t stage, Kind kind, std::int32_t microbatch, std::int32_t slice) {
        const auto first = microbatch >= 0 ? microbatch : none;
        const auto stop = microbatch >= 0 ? microbatch + 1 : bare_.num_microbatches;
        for (auto computed = first; computed < stop; ++computed) {
            const auto parts = groups_.of(stage, kind, computed);
            if (parts.empty()) continue;
            const bool is_sliced = slice >= 0 && bare_.part[parts.back()] >= 0;
            const auto part = static_cast<std::int32_t>(parts.size()) - 1 - slice;
            need(is_sliced ? groups_.find(stage, kind, computed, part) : parts.back(), true);
        }
    }

    // Actions of this rank, which stand side by side.
    void add_whole_step(const std::array<Kind, 4>& kinds) {
        const auto rank = bare_.rank[of_];
        const auto [first, stop] = std::equal_range(bare_.rank.begin(), bare_.rank.end(), rank);
        for (auto at = first; at != stop; ++at) {
            const auto action = static_cast<std::int32_t>(at - bare_.rank.begin());
            if (std::find(kinds.begin(), kinds.end(), bare_.kind[action]) != kinds.end()) need(action);
        }
    }

    const Bare& bare_;
    const ActionGroups& groups_;
    std::vector<std::int32_t> event_;                          // of each action
    std::vector<double> duration_, start_, end_;               // of each event
    std::vector<std::pair<std::int32_t, std::int32_t>> waits_; // an event, and one that waits for it
    std::vector<std::vector<std::int32_t>> sources_, sinks_;   // of each stage
    std::int32_t of_ = none, at_rank_ = none, last_compute_ = none, last_collective_ = none;
    bool lacks_ = false;
};

struct Transfer {
    double at_s;  // nominal: by which transfers are ordered
    Entry send, receive;
    std::int32_t producer, consumer;
};

class Transfers {
   public:
    Transfers(const Bare& bare, const ActionGroups& groups, const DryRun& run, bool at_producers)
        : bare_(bare), groups_(groups), run_(run), at_producers_(at_producers) {}

    std::vector<Transfer> all() {
        for (std::size_t edge = 0; edge < bare_.source.size(); ++edge) {
            const auto source = bare_.source[edge], sink = bare_.sink[edge];
            if (bare_.stage_rank[source] == bare_.stage_rank[sink]) continue;
            for (std::int32_t microbatch = 0; microbatch < bare_.num_microbatches; ++microbatch) {
                add({none, source, SEND_F, microbatch, sink}, {none, sink, RECV_F, microbatch, source},
                    end_of(groups_.of(source, F, microbatch), false), end_of(groups_.of(sink, F, microbatch), true),
                    groups_.find(source, EXCHANGE_F, microbatch, none, sink));
                add({none, sink, SEND_B, microbatch, source}, {none, source, RECV_B, microbatch, sink},
                    backward_end(sink, microbatch, false), backward_end(source, microbatch, true),
                    groups_.find(source, EXCHANGE_B, microbatch, none, sink));
            }
        }
        std::sort(transfers_.begin(), transfers_.end(), [](const Transfer& a, const Transfer& b) {
            // As their texts are: SEND_B comes before SEND_F.
            const auto key = [](const Entry& send) {
                return std::tuple(send.stage, send.kind == SEND_F, send.microbatch, send.peer);
            };
            return a.at_s != b.at_s ? a.at_s < b.at_s : key(a.send) < key(b.send);
        });
        return std::move(transfers_);
    }

   private:
    void add(Entry send, Entry receive, std::int32_t producer, std::int32_t consumer, std::int32_t exchanged) {
        if (producer == none || consumer == none || exchanged != none) return;
        const auto at_s = at_producers_ ? run_.end(producer) : run_.start(consumer);
        transfers_.push_back({at_s, send, receive, producer, consumer});
    }

    // The first or last part in its row.
    static std::int32_t end_of(std::span<const std::int32_t> parts, bool is_first) {
        if (parts.empty()) return none;
        return is_first ? *std::min_element(parts.begin(), parts.end()) : *std::max_element(parts.begin(), parts.end());
    }

    std::int32_t backward_end(std::int32_t stage, std::int32_t microbatch, bool is_first) const {
        const auto whole = groups_.of(stage, B, microbatch);
        return end_of(whole.empty() ? groups_.of(stage, I, microbatch) : whole, is_first);
    }

    const Bare& bare_;
    const ActionGroups& groups_;
    const DryRun& run_;
    bool at_producers_;
    std::vector<Transfer> transfers_;
};

// A message, and the action before which it stands: its number among all, or the first of the next rank.
struct Inserted {
    std::int32_t before;
    std::int64_t turn;  // among those that stand there
    Entry message;
};

class Rank {
   public:
    void insert(std::int32_t before, std::int64_t turn, const Entry& message) {
        inserted_.push_back({before, turn, message});
    }

    std::vector<Entry> merged(std::int32_t first, std::int32_t stop) {
        std::sort(inserted_.begin(), inserted_.end(), [](const Inserted& a, const Inserted& b) {
            return std::tie(a.before, a.turn) < std::tie(b.before, b.turn);
        });
        std::vector<Entry> row;
        row.reserve(stop - first + inserted_.size());
        for (const auto& [before, turn, message] : inserted_) {
            for (; first < before; ++first) row.push_back({first});
            row.push_back(message);
        }
        for (; first < stop; ++first) row.push_back({first});
        return row;
    }

    std::int32_t sent = 0;  // where the last SEND stands

   private:
    std::vector<Inserted> inserted_;
};

bool are_in_range(const Bare& bare) {
    const auto num_stages = static_cast<std::int32_t>(bare.stage_rank.size());
    for (std::size_t action = 0; action < bare.kind.size(); ++action) {
        const auto stage = bare.stage[action];
        if (stage < 0 || stage >= num_stages || bare.stage_rank[stage] != bare.rank[action]) return false;
        if (bare.microbatch[action] < none || bare.microbatch[action] >= bare.num_microbatches) return false;
        if (bare.part[action] < none || bare.peer[action] < none || bare.peer[action] >= num_stages) return false;
    }
    for (std::size_t edge = 0; edge < bare.source.size(); ++edge) {
        if (std::min(bare.source[edge], bare.sink[edge]) < 0) return false;
        if (std::max(bare.source[edge], bare.sink[edge]) >= num_stages) return false;
    }
    return true;
}

}  // namespace

std::optional<Rows> communicate(const Bare& bare, bool held, bool at_producers) {
    if (!are_in_range(bare)) return {};
    const ActionGroups groups(bare);
    if (groups.is_odd()) return {};
    DryRun run(bare, groups, held);
    if (!run.run()) return {};
    const auto transfers = Transfers(bare, groups, run, at_producers).all();
    std::vector<Rank> ranks(bare.num_ranks);
    std::vector<std::int32_t> first(bare.num_ranks + 1);
    for (std::int32_t rank = 0; rank <= bare.num_ranks; ++rank) {
        first[rank] = std::lower_bound(bare.rank.begin(), bare.rank.end(), rank) - bare.rank.begin();
    }
    std::vector<double> starts;
    for (std::size_t action = 0; at_producers && action < bare.kind.size(); ++action) starts.push_back(run.start(action));
    const auto num_transfers = static_cast<std::int64_t>(transfers.size());
    for (std::int64_t turn = 0; turn < num_transfers; ++turn) {
        const auto& [at_s, send, receive, producer, consumer] = transfers[turn];
        const auto from = bare.stage_rank[send.stage], to = bare.stage_rank[receive.stage];
        if (at_producers) {  // Before all that starts after the producer's end.
            for (const auto& [rank, message] : {std::pair(from, send), std::pair(to, receive)}) {
                const auto before = std::lower_bound(starts.begin() + first[rank], starts.begin() + first[rank + 1], at_s);
                ranks[rank].insert(before - starts.begin(), turn, message);
            }
        } else {
            ranks[from].sent = std::max(ranks[from].sent, producer + 1);
            ranks[from].insert(ranks[from].sent, turn - num_transfers, send);  // before a RECV there
            ranks[to].insert(consumer, turn, receive);
        }
    }
    Rows rows;
    for (std::int32_t rank = 0; rank < bare.num_ranks; ++rank) {
        rows.push_back(ranks[rank].merged(first[rank], first[rank + 1]));
    }
    return rows;
}

}  // namespace motet
