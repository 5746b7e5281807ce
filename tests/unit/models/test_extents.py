"""Which rows of packed documents see each other in both directions."""

import pytest
import torch

from motet.models.backbone import Backbone
from motet.models.extents import runs_together


def test_runs_end_with_their_document_and_text(tiny):
    packed = tiny.Packed.of([6, 4, 5], image=[1, 2, 5, 6, 7], audio=[3, 11, 12])
    assert runs_together(packed, ("image", "audio"), False).tolist() == [[1, 4], [5, 6], [6, 8], [11, 13]]
    assert runs_together(packed, ("audio",), False).tolist() == [[3, 4], [11, 13]]
    for none in (runs_together(tiny.Packed.of([6, 4]), ("image",), False), runs_together(packed, (), False)):
        assert none.shape == (0, 2)


def test_a_prefix_ends_at_the_first_target(tiny):
    """A first row is no target, and an image behind the prefix is a run of its own."""
    packed = tiny.Packed.of([6, 0, 4, 3], image=[4, 5, 7])
    packed.targets[:] = False
    packed.targets[[0, 3, 6, 7 + 2]] = True
    assert runs_together(packed, (), True).tolist() == [[0, 3], [6, 9], [10, 13]]
    assert runs_together(packed, ("image",), True).tolist() == [[0, 3], [4, 6], [6, 9], [10, 13]]


@pytest.mark.parametrize("options", [{"bidirectional": ("image",)}, {"prefix": True}])
def test_who_sees_whom_is_not_guessed_without_tokens(tiny, options):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    sequences = tiny.Packed(*nothing, torch.tensor([0, 6]), {})
    backbone = Backbone(tiny.backbone().causal_lm, **options)
    with pytest.raises(ValueError, match="did not read the tokens"):
        backbone.through(torch.zeros(6, tiny.dim, dtype=torch.float64), sequences, 1, 2)
