"""The families of whole models, by the type that their config.json names."""

from __future__ import annotations

from motet.models.whole.family import WholeFamily
from motet.models.whole.gemma3 import GEMMA3
from motet.models.whole.idefics3 import IDEFICS3, SMOLVLM
from motet.models.whole.internvl import INTERNVL
from motet.models.whole.llava import LLAVA
from motet.models.whole.llava_next import LLAVA_NEXT, LLAVA_ONEVISION
from motet.models.whole.mllama import MLLAMA
from motet.models.whole.paligemma import PALIGEMMA
from motet.models.whole.qwen2_5_omni import QWEN2_5_OMNI_THINKER
from motet.models.whole.qwen2_audio import QWEN2_AUDIO
from motet.models.whole.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from motet.models.whole.qwen_vl import QWEN2_5_VL, QWEN2_VL

WHOLE: dict[str, WholeFamily] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "gemma3": GEMMA3,
    "paligemma": PALIGEMMA,
    "internvl": INTERNVL,
    "idefics3": IDEFICS3,
    "smolvlm": SMOLVLM,
    "mllama": MLLAMA,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen2_audio": QWEN2_AUDIO,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI_THINKER,
    "qwen2_5_omni": QWEN2_5_OMNI_THINKER,
}
