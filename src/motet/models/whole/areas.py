"""Images of a whole model whose processor keeps their aspect and bounds their area, as Qwen's do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import UserError
from motet.data.area_images import AreaImages
from motet.models.whole.processor import check_processor, normalisation, open_image_processor


@dataclass(frozen=True)
class Areas:
    """What the tower of such a model takes: sides of patches and of merge blocks, and repeats of each patch."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    def transform(self, path: Path) -> AreaImages:
        """What the processor in `path` makes of images. Raises UserError for one that makes anything else."""
        processor = open_image_processor(path)
        where = f"model.path: the {type(processor).__name__} of {path}"
        check_processor(processor, where)
        if type(processor).__name__ != "Qwen2VLImageProcessorPil":
            raise UserError(f"{where} is not known to Motet for this model; it must be a Qwen2VLImageProcessor.")
        for key in ("patch_size", "merge_size", "temporal_patch_size"):
            if (made := getattr(processor, key)) != getattr(self, key):
                raise UserError(f"{where} has {key} = {made}, and the vision tower takes {getattr(self, key)}.")
        size = dict(processor.size)
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        if not least or not most or least > most:
            raise UserError(
                f"{where} has size = {size}; it must have the smallest area as shortest_edge, and the largest as "
                "longest_edge."
            )
        mean, std = normalisation(processor)
        return AreaImages(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            mean=mean,
            std=std,
            min_area=least,
            max_area=most,
            resample=int(processor.resample),
        )
