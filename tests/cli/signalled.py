"""`motet` that a signal meets in the middle of a step: python signalled.py SIGNAL STEP RANK train RECIPE ...

The rank sends it to itself as it begins that step, in the first of torchrun's attempts alone: every run is met at the
same place, however fast it is. (The first step is 1.)
"""

import os
import sys
from itertools import count

from motet.cli import main
from motet.runtime.step import TrainStep

if __name__ == "__main__":
    number, met, rank = map(int, sys.argv[1:4])
    del sys.argv[1:4]
    steps, run = count(1), TrainStep.run

    def signalled(*args, **kwargs):
        own = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if next(steps) == met and own == (rank, 0):
            os.kill(os.getpid(), number)
        return run(*args, **kwargs)

    TrainStep.run = signalled
    main()
