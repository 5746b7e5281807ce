"""How heterogeneous a dataset is, before any GPU is hired: lengths, composition of sequences, load of the ranks.

Free of torch. `analyze` is the library, `analyze_command` the command line's part; `page.write_html` writes the page.

The words are in docs/glossary.md.
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
