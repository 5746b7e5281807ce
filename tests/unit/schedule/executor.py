"""A second opinion on Programs: ranks that walk their lists, with the rules of training written out once more.

A rank takes its actions one after the other. Sends and receives are posted and take no time; messages between two ranks
arrive in the order sent, and a pass waits for those that it takes in.
"""

from motet.schedule import Action, Kind

EQUAL = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.R: 1}


class Refused(Exception):
    pass


def execute(program, seconds=EQUAL):
    """The start and end of every pass. Raises Refused if a rank waits for ever, or gets a message that is not its."""
    start, end, sent, num_received, arrived = {}, {}, {}, {}, {}
    position = [0] * program.num_ranks
    communicates = any(action.kind is Kind.SEND_F for row in program.actions for action in row)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                previous = max((end[done] for done in row[: position[rank]] if done in end), default=0)
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    made = (Kind.F,) if action.kind is Kind.SEND_F else (Kind.B, Kind.I)
                    time = ended(end, action.stage, made, action.microbatch)
                    channel = (rank, program.stages[action.peer].rank)
                    sent.setdefault(channel, []).append(
                        (action.kind, action.stage, action.peer, action.microbatch, time)
                    )
                elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                    channel = (program.stages[action.peer].rank, rank)
                    arrived[action] = (channel, num_received.get(channel, 0))
                    num_received[channel] = num_received.get(channel, 0) + 1
                else:
                    time = ready(program, action, end, sent, arrived, communicates)
                    if time is None:
                        break
                    start[action] = max(previous, time)
                    end[action] = start[action] + seconds[action.kind]
                position[rank] += 1
                moved = True
    if any(place < len(row) for place, row in zip(position, program.actions)):
        raise Refused("a rank waits for ever")
    return start, end


def ended(end, stage, kinds, microbatch):
    times = [end[action] for kind in kinds if (action := Action(stage, kind, microbatch)) in end]
    if not times:
        raise Refused(f"nothing of stage {stage}, microbatch {microbatch} to send")
    return times[0]


def ready(program, action, end, sent, arrived, communicates):
    """When all that a pass needs is there; None if it is not."""
    stage, microbatch = action.stage, action.microbatch
    needs = []
    if action.kind is Kind.F:
        needs = [(source, Kind.RECV_F, Kind.SEND_F, (Kind.F,)) for source in program.sources(stage)]
    elif action.kind in (Kind.B, Kind.I):
        needs = [(sink, Kind.RECV_B, Kind.SEND_B, (Kind.B, Kind.I)) for sink in program.sinks(stage)]
        needs.append((stage, None, None, (Kind.F,)))
        if Action(stage, Kind.R, microbatch) in {a for row in program.actions for a in row}:
            needs.append((stage, None, None, (Kind.R,)))
    elif action.kind is Kind.R:
        needs = [(stage, None, None, (Kind.F,))]
    elif action.kind is Kind.W:
        needs = [(stage, None, None, (Kind.I,))]
    times = [0]
    for other, receive, send, kinds in needs:
        crosses = communicates and program.stages[other].rank != program.stages[stage].rank
        if crosses:
            posted = Action(stage, receive, microbatch, peer=other)
            if posted not in arrived:
                raise Refused(f"{posted} was not posted")
            channel, place = arrived[posted]
            if place >= len(sent.get(channel, [])):
                return None
            *message, time = sent[channel][place]
            if message != [send, other, stage, microbatch]:
                raise Refused(f"{message} arrives at {posted}")
        else:
            found = [end[made] for kind in kinds if (made := Action(other, kind, microbatch)) in end]
            if not found:
                return None
            time = found[0]
        times.append(time)
    return max(times)


def makespan(program, seconds=EQUAL):
    return max(execute(program, seconds)[1].values())


def seconds_of(forward, backward=None, *, input_=None, weight=None):
    return {Kind.F: forward, Kind.B: backward, Kind.I: input_, Kind.W: weight, Kind.R: forward}
