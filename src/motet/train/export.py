"""The trained modules as HF directories at the end of a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ExportConfig(BaseModel):
    """`[export]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_end: bool = Field(False, description="write each module to export/ in the run's folder, as HF reads it")
