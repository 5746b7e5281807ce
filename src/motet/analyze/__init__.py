"""The heterogeneity of a dataset: lengths, composition of sequences, and load of the ranks, before any GPU is hired.

Free of torch. `analyze` is the library's function, `analyze_command` the command line's. `page.write_analysis_html`
writes the page. The words are in docs/glossary.md.
"""

from motet.analyze.analysis import Analysis, AnalysisSubject, LengthDistribution, analyze
from motet.analyze.command import analyze_command
from motet.analyze.loads import PhaseLoads
from motet.analyze.report import print_analysis

__all__ = [
    "Analysis",
    "AnalysisSubject",
    "LengthDistribution",
    "PhaseLoads",
    "analyze",
    "analyze_command",
    "print_analysis",
]
