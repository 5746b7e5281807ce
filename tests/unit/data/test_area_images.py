"""Images whose area a processor bounds: sizes and pixels of transformers' Qwen2VLImageProcessorPil."""

import numpy as np
import pytest
from PIL import Image

from motet.data.area_images import AreaImages

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.mark.parametrize(("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 1280), (4, 6 * 64, 30 * 64)])
def test_sizes_are_those_of_smart_resize(patch, least, most):
    smart_resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    rng = np.random.default_rng(3)
    sides = np.concatenate([2 ** rng.uniform(3, 12, (2000, 2)), rng.integers(1, 40, (500, 2)) * patch]).astype(np.int64)
    sides = sides[sides.max(axis=1) <= 200 * sides.min(axis=1)]
    transform = AreaImages(patch_size=patch, merge_size=2, min_area=least, max_area=most)
    expected = [smart_resize(height, width, 2 * patch, least, most) for width, height in sides.tolist()]
    assert (transform.sizes(sides) * patch).tolist() == [list(each) for each in expected]


def test_pixels_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 6 * 64, "longest_edge": 30 * 64}
    )
    transform = AreaImages(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_area=6 * 64, max_area=30 * 64, mean=MEAN, std=STD
    )
    rng = np.random.default_rng(4)
    for height, width in ((9, 31), (80, 33), (40, 40), (7, 7)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected, found = theirs(images=[image], return_tensors="np"), transform(image)
        assert expected["image_grid_thw"].tolist() == [[1, *found.size.tolist()]]
        np.testing.assert_array_equal(found.values, expected["pixel_values"])


def test_an_image_for_which_the_processor_stops_is_refused():
    transform = AreaImages(patch_size=4)
    assert transform.accepts(np.array([[200, 1], [201, 1], [1, 201]])).tolist() == [True, False, False]
    assert "longer than 200 : 1" in transform.refusal((201, 1))
