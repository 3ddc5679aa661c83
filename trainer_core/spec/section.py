"""What all sections of a RunSpec share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

ADVANCED: JsonDict = {"advanced": True}
"""`json_schema_extra` of a field that the form folds away."""
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: unknown keys are an error, so that a typo in YAML is not silently ignored."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())
