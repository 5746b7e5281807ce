// communication.cpp: where the messages of a Program stand; see src/motet/schedule/passes/communication.py, which is the
// reference.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace motet {

// In the order of motet.schedule.program.Kind.
enum Kind : std::int32_t {
    F, B, I, W, R, SEND_F, RECV_F, SEND_B, RECV_B, EXCHANGE_F, EXCHANGE_B, GATHER, GATHER_B, REDUCE, NORM, STEP,
    num_kinds
};

// Columns of actions, rank by rank. Of stages: their rank, their group (-1: none), and the share of a pass's nominal
// duration that they take. Of edges: their stages.
struct Bare {
    std::span<const std::int32_t> rank, stage, kind, microbatch, part, peer;
    std::span<const std::int32_t> stage_rank, stage_group;
    std::span<const double> stage_share, nominal;  // nominal: of each kind
    std::span<const std::int32_t> source, sink;
    std::int32_t num_ranks, num_microbatches;
};

// One action of a row: one of those that are given, or a new message.
struct Entry {
    std::int32_t given = -1;  // its number; -1 for a message
    std::int32_t stage = 0, kind = 0, microbatch = 0, peer = 0;
};

using Rows = std::vector<std::vector<Entry>>;

// Without SENDs and RECVs among the actions. Nothing if the Program cannot run, or is not as it should be: the reference
// says why. held: collectives hold up compute. at_producers: both ends stand where the producer ends.
// O(actions log actions).
std::optional<Rows> communicate(const Bare& bare, bool held, bool at_producers);

}  // namespace motet
