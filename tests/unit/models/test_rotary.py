"""Frequencies that follow from a document's length, also on a rank that has some rows of the document alone."""

import numpy as np
import pytest
import torch

from motet.models.rotary import DocumentRotary, document_lengths

KINDS = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 8,
        }
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_long_document_turn_as_the_whole_document_does(tiny, kind):
    causal_lm = tiny.backbone("llama", **KINDS[kind]).causal_lm
    rotary, x = causal_lm.model.rotary_emb, torch.zeros(1, dtype=torch.float64)
    assert isinstance(rotary, DocumentRotary)
    lengths = np.repeat([5, 14, 8, 20], [5, 14, 8, 20])
    positions = torch.cat([torch.arange(count) for count in (5, 14, 8, 20)])[None]

    def turns(rows):
        with document_lengths(causal_lm, lengths[rows]):
            return torch.stack(rotary(x, positions[:, rows]))

    whole, plain = turns(np.arange(47)), rotary(x, positions)[0]
    # Rows of long documents that stand in the first 8 places alone, and none of those of any other document.
    for rows in (np.arange(5, 9), np.array([27, 0, 6, 30, 20]), np.arange(19, 27)):
        assert torch.equal(turns(rows), whole[:, :, rows])
    is_long = torch.from_numpy(lengths > 8)
    differs = (whole[0, 0] - plain[0]).abs().amax(1) > 1e-3
    assert torch.equal(differs, is_long & (positions[0] > 0))
    if kind == "dynamic":
        assert not torch.allclose(whole[:, :, 6], whole[:, :, 28])  # Position 1 of 14 rows, and of 20.
