"""Callbacks that recipes of tests name."""

import torch
from torch import nn

from motet.models.merge import merge_rows


def same(values, sizes):
    return values, sizes


def rows(rows, sizes):
    return rows


def one_argument(rows):
    return rows


def resizing(values, sizes):
    return values, sizes + 1


def cutting(rows, sizes):
    return rows[:-1]


number = 3
drawn = nn.Linear(4, 4)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, rows, sizes):
        return rows * self.weight.sum()


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, values, sizes):
        return values + self.shift, sizes


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, embeds, features, sequences):
        return embeds * self.scale


class Joined(nn.Module):
    """Joins pairs of rows."""

    output_dim = 48

    def num_rows(self, sizes):
        return sizes.prod(axis=1) // 2

    def forward(self, rows, sizes):
        return rows.reshape(-1, 48)


class NeedsMore(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, rows, sizes):
        return rows


class NotCalled:
    pass


def merge(embeds, features, sequences):
    assert features
    return embeds + 1


def merging_all(embeds, features, sequences):
    return embeds + 1


merging_all.takes_text = True


def averaging(embeds, features, sequences):
    """Each row gets the mean of its sequence."""
    merged, lengths = merge_rows(embeds, features, sequences), sequences.offsets.diff().long()
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = merged.new_zeros(len(lengths), merged.shape[1]).index_add(0, number, merged)
    return merged + (sums / lengths[:, None])[number]


averaging.takes_text = True


def shrinking(embeds, features, sequences):
    return embeds[:-1]
