"""Units with context-parallel ranks equal one process. More of what they combine with: benchmarks/fuzz_plans.py."""

from dataclasses import replace

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from parity.planned_parts import SECOND
from tiers import in_tiers

WAYS = ("group_cast", "all_gather", "ulysses")
ENCODERS = Unit("encoders", ({"image": 3, "audio": 2},), cp=2, zero=1)
CUT = Unit("encoders", ({"image": 2}, {"image": 1, "audio": 2}), pp=2, cp=2, zero=0, recompute=({"image": 1}, {}))
OF_ENCODERS = {
    3: [
        PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), microbatch_size=2),
        PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), left_out=0.5, dropout=0.2),
    ],
    4: [PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2, dp=2, zero=2)), batch_size=4)],
    5: [PlannedCase((CUT, Unit("llm", ({"backbone": 3},), first_rank=4)), "gpipe", microbatch_size=3)],
}
"""Encoders whose items are dealt out over the ranks of a replica, beside a backbone."""


def chain(cp, *stages, **options):
    return (Unit("all", stages, pp=len(stages), cp=cp, **options),)


WHOLE = {"image": 3, "audio": 2, "backbone": 3}
LLM = {"backbone": 1}, {"backbone": 2}
RECOMPUTED = {"image": 1, "backbone": 2}, {"backbone": 1}
OF_BACKBONES = {
    2: [
        *(PlannedCase(chain(2, WHOLE, zero=stage), exchange=way) for stage, way in enumerate(WAYS)),
        PlannedCase(chain(2, WHOLE), contents=(), batch_size=3, exchange="all_gather"),
        PlannedCase(chain(2, WHOLE, zero=3), left_out=0.7, microbatch_size=2, tied=True),
        PlannedCase(chain(2, WHOLE), frozen=("image", "backbone"), parts=("again",)),
        PlannedCase(chain(2, {"backbone": 3}, replicated=("image", "audio"))),
        *(PlannedCase(chain(2, WHOLE), exchange=way, parts=("ahead", "again"), dropout=0.2) for way in WAYS),
        PlannedCase(chain(2, WHOLE, zero=3), microbatch_size=2, parts=("prefix",), left_out=0.3, family="gemma2"),
        PlannedCase(chain(2, WHOLE), parts=("merge",), family="gpt2", dropout=0.2),
    ],
    3: [
        *(PlannedCase(chain(3, WHOLE), exchange=way, parts=("ahead",), family="gemma2") for way in WAYS[:2]),
        PlannedCase((Unit("encoders", ({"image": 3, "audio": 2},)), *chain(2, {"backbone": 3}, first_rank=1))),
        PlannedCase(chain(3, {SECOND: 2} | WHOLE), exchange="all_gather", parts=("rows",)),
    ],
    4: [
        PlannedCase(chain(2, {"image": 3, "audio": 2, "backbone": 2}, {"backbone": 1}, zero=0), "gpipe", dropout=0.2),
        PlannedCase(
            chain(2, {"image": 2}, {"image": 1, "audio": 2, "backbone": 3}),
            "zb_h1",
            exchange="group_cast",
            head_groups=2,
        ),
        PlannedCase(
            (replace(chain(2, {"image": 2}, {"image": 1, "audio": 2}, {"backbone": 2}, {"backbone": 1})[0], pp=2),),
            "zb_v",
            parts=("again",),
        ),
        PlannedCase(chain(4, WHOLE), contents=(), batch_size=2),
        *(PlannedCase(chain(4, WHOLE), exchange=way, parts=("ahead",), family="gemma3") for way in WAYS),
        PlannedCase(
            chain(2, {"image": 3, "audio": 2, "backbone": 2}, {"backbone": 1}, recompute=RECOMPUTED),
            exchange="ulysses",
            parts=("ahead", "prefix"),
        ),
        *(PlannedCase(chain(2, WHOLE, tp=2), exchange=way, dropout=0.2) for way in ("group_cast", "ulysses")),
        PlannedCase(chain(2, WHOLE, dp=2, zero=2, shard_size=2)),
        PlannedCase((ENCODERS, *chain(2, {"backbone": 3}, first_rank=2)), microbatch_size=2, tied=True),
    ],
    5: [
        PlannedCase(
            (Unit("encoders", ({"image": 3, "audio": 2},), dp=3), *chain(2, {"backbone": 3}, first_rank=3)),
            balance="per_phase",
        ),
        PlannedCase((Unit("encoders", ({"image": 3, "audio": 2},)), *chain(2, *LLM, first_rank=1)), parts=("again",)),
    ],
}
"""The backbone's rows are shared."""
READ = {"image": 4, "audio": 3, "backbone": 3}
"""With a block of queries behind each encoder."""
BESIDE = Unit("encoders", ({"image": 3, "audio": 2},), cp=2, zero=3, recompute=({"image": 2, "audio": 1},))
IN_CHUNKS = (replace(chain(4, {"image": 1}, {"image": 2, "audio": 2, "backbone": 3})[0], pp=1),)
TWO_ENCODERS = (Unit("all", ({"image": 3, SECOND: 1}, {SECOND: 1, "audio": 2, "backbone": 3}), pp=1, cp=3, zero=0),)
LARGE = {
    2: [
        PlannedCase(chain(2, WHOLE), has_large=True),
        PlannedCase(
            chain(2, WHOLE, zero=3, recompute=({"image": 2},)), microbatch_size=3, has_large=True, left_out=0.3
        ),
        PlannedCase(chain(2, WHOLE), frozen=("image encoder",), parts=("again",), has_large=True),
        PlannedCase(chain(2, WHOLE), frozen=("image block",), parts=("ahead",), has_large=True, lora=("image",)),
        PlannedCase(chain(2, {"backbone": 3}, replicated=("image", "audio")), has_large=True),
        PlannedCase(chain(2, READ), parts=("queries",), has_large=True),
        PlannedCase(
            chain(2, READ, zero=3, recompute=({"image": 4, "audio": 1},)),
            parts=("queries",),
            microbatch_size=3,
            has_large=True,
            left_out=0.3,
            frozen=("image encoder",),
        ),
    ],
    3: [
        PlannedCase(
            (replace(BESIDE, stages=({"image": 4, "audio": 3},)), Unit("llm", ({"backbone": 3},), first_rank=2)),
            parts=("queries",),
            microbatch_size=2,
            has_large=True,
        ),
        PlannedCase((BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2)), microbatch_size=2, has_large=True),
        PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), has_large=True, frozen=("image",)),
        PlannedCase(chain(3, WHOLE), microbatch_size=2, exchange="all_gather", has_large=True),
        # Two encoders are in a stage that sends both on: a rank without rows has no gradient of either.
        PlannedCase(TWO_ENCODERS, "zb_v", parts=("sum",), batch_size=6, has_large=True, seed=2),
    ],
    4: [
        PlannedCase(chain(4, WHOLE), has_large=True),
        # Cut before queries, of which a rank may have none.
        PlannedCase(
            chain(2, {"image": 3}, {"image": 1, "audio": 3, "backbone": 3}, recompute=({"image": 1}, {"image": 1})),
            parts=("queries",),
            has_large=True,
        ),
        # A rank without rows gets no message, in the stage with the encoder's end neither.
        PlannedCase(IN_CHUNKS, "interleaved_1f1b", has_large=True),
        PlannedCase(
            chain(2, {"image": 2}, {"image": 1, "audio": 2, "backbone": 3}, recompute=({"image": 1}, {"image": 1})),
            "zb_h1",
            has_large=True,
        ),
        PlannedCase((ENCODERS, *chain(2, {"backbone": 3}, first_rank=2)), microbatch_size=2, has_large=True),
        PlannedCase(chain(2, WHOLE, tp=2), microbatch_size=2, has_large=True),
        PlannedCase(
            (
                Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, cp=2),
                Unit("encoders", ({"image": 3, "audio": 2},), dp=2, cp=2, recompute=({"image": 2},)),
            ),
            batch_size=4,
            has_large=True,
        ),
    ],
    5: [
        PlannedCase((CUT, Unit("llm", ({"backbone": 3},), first_rank=4)), "gpipe", microbatch_size=3, has_large=True),
        PlannedCase((CUT, Unit("llm", ({"backbone": 3},), first_rank=4)), has_large=True, seed=1),
    ],
    # A rank without rows is in a stage without the encoder's weights before its blocks.
    6: [
        PlannedCase(
            chain(3, {"image": 2}, {"image": 1, "audio": 2, "backbone": 3}, recompute=({"image": 1}, {"image": 1})),
            has_large=True,
            seed=2,
        )
    ],
}
"""Images that ranks cut, of which some have no row of a small one."""


SOUND = Unit("encoders", ({"audio": 1}, {"audio": 1, "image": 3}), pp=2, cp=2, zero=0, recompute=({"audio": 1}, {}))
IN_AUDIO = chain(2, {"audio": 1}, {"audio": 1, "image": 3, "backbone": 3})


def sound(*units, schedule="1f1b", contents=("audio",), **options):
    return PlannedCase(units, schedule, contents=contents, has_large=True, **options)


CLIPS = {
    2: [
        sound(*chain(2, WHOLE), dropout=0.2),
        sound(*chain(2, WHOLE, zero=3, recompute=({"audio": 1},)), microbatch_size=2, left_out=0.3),
        sound(*chain(2, {"backbone": 3}, replicated=("image", "audio"))),
        sound(*chain(2, WHOLE), frozen=("audio encoder",)),
        # Images drop out, too, as do their towers.
        sound(*chain(2, WHOLE), contents=("image", "audio"), dropout=0.2, microbatch_size=2, seed=3),
        sound(*chain(2, WHOLE), contents=("image", "audio"), dropout=0.2, parts=("tiled",)),
    ],
    3: [
        sound(BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2), microbatch_size=2),
        sound(*chain(3, WHOLE), microbatch_size=2, dropout=0.2),
    ],
    4: [
        # From stage to stage go rows of fragments, and of whole clips that are not padded beside them.
        sound(*IN_AUDIO, microbatch_size=2, dropout=0.2),
        sound(replace(IN_AUDIO[0], recompute=({}, {"audio": 1})), schedule="zb_h1", microbatch_size=3),
        sound(ENCODERS, *chain(2, {"backbone": 3}, first_rank=2), microbatch_size=2),
        sound(*chain(2, WHOLE, tp=2), microbatch_size=2, dropout=0.2),
        sound(*chain(4, WHOLE)),
        # Rows that queries read, two frames each, go from stage to stage.
        sound(*chain(2, {"audio": 2}, {"audio": 1, "image": 4, "backbone": 3}), parts=("queries",), microbatch_size=2),
    ],
    5: [sound(SOUND, Unit("llm", ({"backbone": 3},), first_rank=4), microbatch_size=3, schedule="gpipe")],
}
"""Clips that ranks cut: convolutions see frames of other ranks, and the projector joins rows of two."""


def wide(*units, schedule="1f1b", parts=(), of="stacked", **options):
    return PlannedCase(units, schedule, parts=(of, *parts), has_large=True, **options)


ON_TWO = Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, cp=2)
IN_BUBBLES = Unit("encoders", ({"image": 3, "audio": 2},), cp=2, zero=1)
INSIDE = chain(2, {"image": 2}, {"image": 1, "audio": 2, "backbone": 3}, recompute=({"image": 1}, {"image": 1}))
WIDE = {
    2: [
        wide(*chain(2, WHOLE)),
        wide(*chain(2, WHOLE, zero=3, recompute=({"image": 2},)), microbatch_size=2, left_out=0.3),
        wide(*chain(2, {"backbone": 3}, replicated=("image", "audio"))),
        wide(*chain(2, WHOLE), frozen=("image encoder",), parts=("ahead",)),
    ],
    3: [wide(BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2), microbatch_size=2)],
    4: [
        # Rows of inner blocks so far go along from stage to stage; a rank without rows gets no message.
        wide(*chain(2, {"image": 1}, {"image": 2, "audio": 2, "backbone": 3})),
        wide(*INSIDE, schedule="zb_h1"),
        wide(ENCODERS, *chain(2, {"backbone": 3}, first_rank=2), microbatch_size=2),
        wide(ON_TWO, Unit("encoders", ({"image": 3, "audio": 2},), dp=2, cp=2), batch_size=4),
    ],
}
"""Videos of Qwen3-VL's tower that ranks cut: rows of inner blocks go along with those of the last."""
TILED = {
    2: [
        wide(*chain(2, WHOLE), of="tiled"),
        wide(*chain(2, WHOLE, zero=3, recompute=({"image": 2},)), of="tiled", microbatch_size=2, left_out=0.3),
        wide(*chain(2, {"backbone": 3}, replicated=("image", "audio")), of="tiled"),
        wide(*chain(2, WHOLE), of="tiled", frozen=("image encoder",), parts=("again",)),
    ],
    3: [wide(BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2), of="tiled", microbatch_size=2)],
    4: [
        # Each tile has a class row, which goes along from stage to stage; some ranks have no tile.
        wide(*chain(2, {"image": 1}, {"image": 2, "audio": 2, "backbone": 3}), of="tiled"),
        wide(*INSIDE, of="tiled", schedule="zb_h1"),
        wide(ENCODERS, *chain(2, {"backbone": 3}, first_rank=2), of="tiled", microbatch_size=2),
        wide(ON_TWO, Unit("encoders", ({"image": 3, "audio": 2},), dp=2, cp=2), of="tiled", batch_size=4),
        wide(*chain(4, WHOLE), of="tiled"),
        wide(*chain(2, WHOLE, tp=2), of="tiled"),
    ],
}
"""Images that ranks cut between tiles."""
LINES = {
    2: [
        wide(*chain(2, WHOLE), of="lines"),
        wide(*chain(2, WHOLE, zero=3, recompute=({"image": 2},)), of="lines", microbatch_size=2, left_out=0.3),
        wide(*chain(2, {"backbone": 3}, replicated=("image", "audio")), of="lines", dropout=0.2),
    ],
    3: [wide(BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2), of="lines", microbatch_size=2)],
    4: [
        # The class row of a tile goes along with its first row.
        wide(*chain(2, {"image": 1}, {"image": 2, "audio": 2, "backbone": 3}), of="lines", microbatch_size=2),
        wide(*INSIDE, of="lines", schedule="zb_h1"),
        wide(*chain(4, WHOLE), of="lines"),
    ],
}
"""Images of tiles that ranks cut, also within a tile, and whose rows become one raster."""
KEYED = {
    2: [
        wide(*chain(2, WHOLE), of="keys"),
        wide(*chain(2, WHOLE, zero=3, recompute=({"image": 2},)), of="keys", microbatch_size=2, left_out=0.3),
        wide(*chain(2, {"backbone": 3}, replicated=("image", "audio")), of="keys", dropout=0.2),
        wide(*chain(2, WHOLE), of="keys", frozen=("image encoder",)),
        # In bubbles: shared by ranks that share products of the backbone, and by those that share its sequences.
        wide(Unit("llm", ({"backbone": 3},), tp=2), IN_BUBBLES, of="keys", microbatch_size=2),
        wide(Unit("llm", ({"backbone": 3},), cp=2), IN_BUBBLES, of="keys"),
    ],
    3: [wide(BESIDE, Unit("llm", ({"backbone": 3},), first_rank=2), of="keys", microbatch_size=2)],
    4: [
        # One rank makes the wide row of all, and rows of the others end with the tower.
        wide(*chain(2, {"image": 1}, {"image": 2, "audio": 2, "backbone": 3}), of="keys"),
        wide(*INSIDE, of="keys", schedule="zb_h1"),
        wide(ENCODERS, *chain(2, {"backbone": 3}, first_rank=2), of="keys", microbatch_size=2),
        wide(ON_TWO, Unit("encoders", ({"image": 3, "audio": 2},), dp=2, cp=2), of="keys", batch_size=4),
        wide(*chain(4, WHOLE), of="keys"),
        wide(*chain(2, WHOLE, tp=2), of="keys"),
    ],
}
"""Images that become one row of keys each."""
IN_HEAD_GROUPS = [
    PlannedCase(
        chain(2, WHOLE, zero=3, recompute=({"image": 1, "backbone": 2},)),
        exchange="group_cast",
        head_groups=2,
        parts=("ahead", "again"),
        dropout=0.2,
    ),
    PlannedCase(chain(2, WHOLE), contents=(), batch_size=3, exchange="all_gather", head_groups=2, family="gemma2"),
]
"""Keys and values of the second half of the heads travel while attention of the first is computed."""


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(OF_BACKBONES, {2: (0, 9, 11), 4: (1, 9)}))
def test_ranks_that_share_sequences_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
def test_keys_of_groups_of_heads_that_travel_meanwhile_equal_one_process():
    assert_planned(2, IN_HEAD_GROUPS)


@pytest.mark.parametrize("num_ranks", [*(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4)), 5])
def test_encoders_that_share_items_equal_one_process(num_ranks):
    assert_planned(num_ranks, OF_ENCODERS[num_ranks])


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(LARGE, {2: (0,), 3: (1,), 4: (1, 2)}))
def test_ranks_that_share_images_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CLIPS, {2: (0,), 4: (0,)}))
def test_ranks_that_share_clips_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(WIDE, {2: (0,), 4: (0,)}))
def test_ranks_that_share_videos_of_rows_for_several_blocks_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(TILED, {2: (0,), 4: (0,)}))
def test_ranks_that_share_tiles_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(KEYED, {2: (0,), 4: (0,)}))
def test_ranks_that_share_images_of_keys_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(LINES, {4: (0,)}))
def test_ranks_that_share_tiles_of_one_raster_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)
