"""`motet analyze`: the analysis with its progress, its tables and its page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from motet.analyze.analysis import AnalysisSubject, analyze
from motet.analyze.loads import Mix
from motet.analyze.report import print_analysis
from motet.core.files import check_output


def analyze_command(
    source: Path | str | AnalysisSubject,
    *,
    num_ranks: int = 8,
    batch_size: int = 128,
    num_batches: int = 50,
    seed: int = 0,
    mix: Mix = "rows",
    tokenizer: Path | None = None,
    index_folder: Path | None = None,
    num_workers: int = 2,
    html: Path | None = None,
) -> None:
    """Analyse `source`, write the page to `html` if given, and print the tables. Raises UserError as `analyze` does."""
    if html is not None:
        check_output(html)
    # Progress goes to stderr, so that the tables can be piped.
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading headers", total=1.0)
        analysis = analyze(
            source,
            num_ranks=num_ranks,
            batch_size=batch_size,
            num_batches=num_batches,
            seed=seed,
            mix=mix,
            tokenizer=tokenizer,
            index_folder=index_folder,
            num_workers=num_workers,
            progress=lambda _, share: bars.update(task, completed=share),
        )
    if html is not None:
        # Imported here: importing plotly takes a second, and only the page needs it.
        from motet.analyze.page import write_analysis_html

        write_analysis_html(analysis, html)
    print_analysis(analysis)
    if html is not None:
        print(f"Wrote {html}.")
