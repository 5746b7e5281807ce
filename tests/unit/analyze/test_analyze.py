import gzip
import io
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from motet.analyze import analyze, analyze_command, print_analysis
from motet.analyze.lengths import read_lengths
from motet.analyze.loads import LENGTH_COSTS, MODES, PREDICTED, place, take
from motet.analyze.page import write_analysis_html
from motet.analyze.report import load_rows, step_rows
from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from unit.data.samples import a_record, write_clip, write_image, write_manifest

COLUMNS = "task,source,image_width,image_height,num_images,image_tokens,audio_seconds,text_tokens\n"
ROWS = [
    "caption,coco,56,28,1,,,10",  # 2 x 4 patches, 2 tokens
    "image_qa,internvl,,,5,1280,,80",  # 5 tiles
    "image_chat,servegen,,,2,101,,7",  # 51 and 50 tokens
    "asr,speech,,,0,,3.211,12",  # 322 frames, 81 tokens
    "text,chat,,,,,,300",
]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(COLUMNS + "\n".join(ROWS) + "\n")
    return path


def test_a_table_of_lengths(table, tmp_path):
    lengths = read_lengths(table)
    images, clips = lengths.batch.items["image"], lengths.batch.items["audio"]
    assert images.example.tolist() == [0, 1, 1, 1, 1, 1, 2, 2]
    assert images.length.tolist() == [8, 1025, 1025, 1025, 1025, 1025, 204, 200]
    assert images.num_tokens.tolist() == [2, 256, 256, 256, 256, 256, 51, 50]
    assert (clips.example.tolist(), clips.length.tolist(), clips.num_tokens.tolist()) == ([3], [322], [81])
    assert lengths.batch.sequence.tolist() == [12, 1360, 108, 93, 300]
    assert lengths.text_tokens().tolist() == [10, 80, 7, 12, 300]
    assert lengths.kinds().tolist() == [1, 1, 1, 2, 0]
    with gzip.open(tmp_path / "lengths.csv.gz", "wt") as file:
        file.write(table.read_text())
    zipped = read_lengths(tmp_path / "lengths.csv.gz")
    assert zipped.batch.sequence.tolist() == lengths.batch.sequence.tolist()


def test_a_manifest(tmp_path):
    write_image(tmp_path / "a.png", 56, 28)
    write_clip(tmp_path / "b.wav", 1601)
    records = [
        a_record("<image> What?", "Eight letters.", image="a.png"),
        a_record("<audio>", "ok", audio="b.wav"),
        a_record("<image>", image="missing.png"),
    ]
    manifest = write_manifest(tmp_path / "m.jsonl", records)
    lengths = read_lengths(manifest)
    assert lengths.batch.items["image"].length.tolist() == [8]
    assert lengths.batch.items["audio"].length.tolist() == [11]
    # Bytes over four, a turn at a time, the placeholder's among them.
    assert lengths.text_tokens().tolist() == [4 + 4, 2 + 1]
    assert "1 of 3 examples left out: 1 with files that cannot be used" in lengths.left_out
    assert any("4 bytes a token" in assumption for assumption in lengths.assumptions)


def test_figures_are_right_for_batches_done_by_hand(table):
    batch = take(read_lengths(table).batch, np.array([1, 4, 3, 1]), num_ranks=2)
    assert batch.sequence.tolist() == [1360, 300, 93, 1360]
    assert batch.items["image"].example.tolist() == [0] * 5 + [3] * 5
    assert batch.items["audio"].example.tolist() == [2]
    phases = LENGTH_COSTS.phases(batch)
    off, backbone, joint, every = (place(batch, phases, 2, mode) for mode in MODES)
    assert off[BACKBONE].loads.tolist() == [1660, 1453]
    assert off["image"].loads.tolist() == [5125, 5125]
    assert off["audio"].loads.tolist() == [0, 322]
    assert backbone[BACKBONE].loads.max() == 1660
    assert every["image"].loads.max() == 5125
    # Media follow their examples when the backbone alone is balanced, and when whole examples are placed.
    for followed in (backbone, joint):
        assert followed["image"].ranks.tolist() == followed[BACKBONE].ranks[batch.items["image"].example].tolist()
    # One example of five tiles on each rank: the first with the clip, the other with the long text, or the reverse.
    assert joint["image"].loads.tolist() == [5125, 5125]
    assert sorted(joint[BACKBONE].loads) == [1453, 1660]


def test_balancing_more_phases_never_does_worse(table):
    analysis = analyze(table, num_ranks=4, batch_size=32, num_batches=20)
    assert list(analysis.loads) == [BACKBONE, "image", "audio"]
    for loads in analysis.loads.values():
        assert (loads.max_over_bound("per_phase") >= 1).all()
        assert loads.max_over_bound("per_phase").mean() <= loads.max_over_bound("off").mean()
        # The same work, however it is placed.
        assert loads.loads["off"].shape == loads.loads["per_phase"].shape == (20, 4)
    # Of packed items only the excess crosses; padded ones meet their like wherever they are.
    for phase, least, most in (("image", 0.0, 0.5), ("audio", 0.5, 1.0)):
        crossed = analysis.loads[phase].crossed
        assert all((crossed[mode] == 0).all() for mode in ("off", "backbone", "joint"))
        assert least < crossed["per_phase"].mean() < most
    image = analysis.loads["image"]
    assert image.max_over_bound("joint").mean() < image.max_over_bound("backbone").mean()
    packed = analysis.loads[BACKBONE].loads
    np.testing.assert_array_equal(packed["off"].sum(axis=1), packed["per_phase"].sum(axis=1))
    shares = sum(analysis.shares.values())
    np.testing.assert_allclose(shares, 1)


def test_crossing_is_of_batches_that_have_items(tmp_path):
    path = tmp_path / "rare.csv"
    path.write_text(COLUMNS + "rare,a,280,280,2,,,1000\n" + "text,b,,,,,,10\n" * 20)
    analysis = analyze(path, num_ranks=2, batch_size=2, num_batches=60, seed=1)
    loads = analysis.loads["image"]
    assert 0 < (loads.bounds > 0).sum() < 20, "few batches have images"
    assert loads.crossing("per_phase").tolist() == [0.5] * (loads.bounds > 0).sum(), (
        "one of both goes to the other rank"
    )
    assert load_rows(analysis)[-1][1:] == ["every phase", "1.000", "1.000", "1.000", "50%"]


def test_what_is_chosen_is_what_is_predicted_to_be_fastest(table):
    steps = analyze(table, num_ranks=4, batch_size=32, num_batches=20).steps
    assert sum(steps.methods.values()) == 20
    chosen = steps.seconds["chosen"]
    for way in ("joint", "per_phase", "unbalanced"):
        assert (chosen <= steps.seconds[way]).all()
        assert (steps.exchange_s[way] <= steps.seconds[way]).all()
    assert not steps.exchange_s["joint"].any()
    assert steps.exchange_s["per_phase"].all()
    assert steps.why.split(":")[0] == max(steps.methods, key=lambda method: steps.methods[method])


def test_the_same_seed_gives_the_same_figures(table):
    def spread(**options) -> list[float]:
        return analyze(table, num_ranks=4, batch_size=16, **options).loads[BACKBONE].max_over_mean("off").tolist()

    assert spread(seed=1) == spread(seed=1) != spread(seed=2)
    assert spread(mix="even") == spread(mix="even") != spread()


def test_even_mixing_draws_each_combination_alike(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("audio_seconds,text_tokens\n" + ",10\n" * 990 + "5,10\n" * 10)
    rows, even = (analyze(path, num_ranks=1, batch_size=400, num_batches=4, mix=mix) for mix in ("rows", "even"))
    # 500 frames a clip, and padded cost: the load of one rank counts the clips.
    assert rows.loads["audio"].loads["off"].mean() / 500 < 20
    assert 150 < even.loads["audio"].loads["off"].mean() / 500 < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"line 1: names no known column; it must name some of image_width"),
        ("text_tokens\n1e300\n", r"line 2: 'text_tokens' is '1e300', but must be empty or a number from 0 to 4,294"),
        ("num_images,text_tokens\n1e9,3\n", r"line 2: 'num_images' is '1e9', but must be .* 0 to 100,000"),
        ("text_tokens\n3\n3,4\n", r"line 3: has more fields than line 1 has names"),
        ("text_tokens\n3\nmany\n", r"line 3: 'text_tokens' is 'many', but must be empty or a number"),
        ("text_tokens\n-3\n", r"line 2: 'text_tokens' is '-3'"),
        ("text_tokens\nnan\n", r"line 2: 'text_tokens' is 'nan'"),
        ("text_tokens\n", "holds no row"),
        ("text_tokens,num_images\n3,0\n3,2\n", r"line 3: 'num_images' is 2, and nothing says how large they are"),
        ("num_images,image_tokens\n0,256\n", r"line 2: 'num_images' is 0, and it has lengths of images"),
        ("image_width,text_tokens\n640,3\n", r"line 2: has one of image_width and image_height; it must have both"),
        ("text_tokens,num_images\n3,0\n3\n", r"line 3: has fewer fields than line 1 has names"),
        ("text_tokens\n" + "9" * 200_000, r"line 2: is no CSV \(field larger than field limit"),
        ('text_tokens\n"3\n', r"line 2: is no CSV \(unexpected end of data\)"),
        ("text_tokens\n" + "9" * 5000, r"line 2: 'text_tokens' is '9{40}...', but must be empty or a number"),
        ("text_tokens\n\0\n", r"line 2: 'text_tokens' is '\\x00', but must be empty or a number"),
        ("text_tokens,text_tokens\n1,2\n", r"line 1: names 'text_tokens' twice"),
        ("text_tokens,image_widht\n1,2\n", r"line 1: has a column 'image_widht'; is it meant to be 'image_width'\?"),
        ("text_tokens,video_seconds\n1,2\n", r"line 1: has a column 'video_seconds', which is no length that is read"),
        (b"\x89PNG\r\n", r"lengths.csv: is not UTF-8; save it as UTF-8"),
        ("text_tokens\n3\n".encode("utf-16"), r"lengths.csv: is not UTF-8; save it as UTF-8"),
    ],
)
def test_wrong_tables(tmp_path, text, message):
    path = tmp_path / "lengths.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        analyze(path)


def test_a_table_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext_tokens,task\r\n7,chat\r\n")
    assert read_lengths(tmp_path / "a.csv").batch.sequence.tolist() == [7]


def test_answers_without_loss_are_no_targets(tmp_path):
    record = a_record("Hello", "Eight letters.")
    record["conversations"] += [{"from": "human", "value": "More?"}, {"from": "gpt", "value": "No", "loss": False}]
    lengths = read_lengths(write_manifest(tmp_path / "m.jsonl", [record]))
    assert lengths.batch.num_targets.tolist() == [4]


def test_wrong_use(tmp_path, table):
    with pytest.raises(UserError, match="no such file"):
        analyze(tmp_path / "none.csv")
    with pytest.raises(UserError, match="no such file"):
        analyze(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="num_ranks is 0"):
        analyze(table, num_ranks=0)
    with pytest.raises(UserError, match="tokenizer is of no use"):
        analyze(table, tokenizer=tmp_path)
    whole = gzip.compress(b"text_tokens\n" + b"".join(b"%d\n" % row for row in range(9999)))
    for damaged in (b"plain", whole[:2000], whole[:2000] + b"0000" + whole[2004:]):
        (tmp_path / "no.csv.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"no\.csv\.gz: is no whole gzip file \("):
            analyze(tmp_path / "no.csv.gz")
    with pytest.raises(UserError, match="cannot be written"):
        write_analysis_html(analyze(table, num_batches=2), tmp_path / "no folder" / "a.html")


def test_tables_and_page(table, tmp_path, capsys):
    analyze_command(table, num_ranks=4, batch_size=16, num_batches=3, html=tmp_path / "page.html")
    printed = " ".join(capsys.readouterr().out.split())  # a long path may wrap the line
    for expected in (
        "5 examples",
        "patches",
        "frames",
        "unbalanced",
        "joint (whole",
        "every phase",
        "as chosen",
        "1,025 patches",
        "Balanced on lengths, as no model is known",
        "in tokens (backbone), patches (image), frames (audio)",
    ):
        assert expected in printed
    page = (tmp_path / "page.html").read_text()
    assert "<script src=" not in page, "plotly is inside"
    for expected in ("Share of each example", "One batch, rank by rank", "Assumptions", "Plotly.newPlot"):
        assert expected in page


def test_text_alone(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("text_tokens\n3\n40\n")
    analysis = analyze(path, num_ranks=8, batch_size=4, num_batches=3)
    assert [kind.name for kind in analysis.lengths] == ["sequence", "text"]
    output = io.StringIO()
    print_analysis(analysis, Console(file=output, width=120))
    assert "backbone" in output.getvalue()
    write_analysis_html(analysis, tmp_path / "page.html")


def test_names_of_files_are_printed_as_they_are(table, tmp_path):
    """Also where brackets stand in them, by which rich says styles."""
    analysis = analyze(table, num_batches=2)
    analysis = replace(
        analysis, source="set [final]/[/bold].csv", left_out="the first: photo [1] [red].jpg: no such file"
    )
    output = io.StringIO()
    print_analysis(analysis, Console(file=output, width=120))
    assert f"{analysis.source}: 5 examples\n{analysis.left_out}" in output.getvalue()


def test_no_torch_is_imported():
    code = "import sys, motet.analyze, motet.analyze.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_stands_at_a_url_is_read_as_a_file_is(tmp_path):
    import fsspec

    table, manifest = tmp_path / "a.csv", write_manifest(tmp_path / "m.jsonl", [a_record("Hi", "Hello")])
    table.write_text("text_tokens\n7\n")
    files = fsspec.filesystem("memory")
    for path in (table, manifest):
        files.pipe_file(f"/analysed/{path.name}", path.read_bytes())
        there, here = read_lengths(f"memory://analysed/{path.name}"), read_lengths(path)
        assert there.batch.sequence.tolist() == here.batch.sequence.tolist()
    with pytest.raises(UserError, match=r"there is no such file"):
        read_lengths("memory://analysed/b.csv")
    with pytest.raises(UserError, match=r"URLs of 'ftp://' are not read"):
        read_lengths("ftp://analysed/b.csv")


def test_steps_of_microseconds_are_shown_as_such():
    seconds = dict.fromkeys(PREDICTED, np.array([3e-6, 5e-6]))
    steps = SimpleNamespace(seconds=seconds, exchange_s=dict.fromkeys(PREDICTED, np.array([0.0])))
    assert step_rows(SimpleNamespace(steps=steps))[0][1:] == ["4 µs", "0 µs", "100.0%"]
