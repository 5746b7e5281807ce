"""When the passes of a Program without communication end, if ranks take them in order: the rules, once more."""

from motet.schedule import Kind


def ends(program, seconds):
    """End of every pass. seconds: by action. Fails where ranks wait for each other."""
    end, free, place = {}, [0.0] * program.num_ranks, [0] * program.num_ranks
    num_left = program.num_actions
    while num_left:
        before = num_left
        for rank, row in enumerate(program.actions):
            while place[rank] < len(row):
                action = row[place[rank]]
                stage, kind, microbatch = action[:3]
                needed = [(source, Kind.F) for source in program.sources(stage)]
                if kind is Kind.B:
                    needed = [(sink, Kind.B) for sink in program.sinks(stage)] + [(stage, Kind.F)]
                needed = [key for key in needed if program.stages[key[0]].takes(microbatch)]
                if any((*key, microbatch) not in end for key in needed):
                    break
                start = max([free[rank], *(end[(*key, microbatch)] for key in needed)])
                end[stage, kind, microbatch] = free[rank] = start + seconds(action)
                place[rank] += 1
                num_left -= 1
        assert num_left < before, "the ranks wait for each other"
    return end


def makespan(program, forward_s=1, backward_s=2):
    return max(ends(program, lambda action: forward_s if action.kind is Kind.F else backward_s).values())
