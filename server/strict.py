"""What all bodies of requests are made of: models that take no field they do not know, and errors that name a field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def conflict(param: str | None, message: str) -> PydanticCustomError:
    """Two fields that do not go together; `param` is the whole path of the one to blame."""
    return PydanticCustomError("conflict", "{message}", {"param": param, "message": message})


def lacking(member: str) -> PydanticCustomError:
    """A member of the object under validation that is required because of the others."""
    return PydanticCustomError("missing", "it is required here", {"member": member})


def misplaced(member: str | int, message: str) -> PydanticCustomError:
    """A member of the object, or item of the list, under validation that does not go with the others."""
    return PydanticCustomError("misplaced", "{message}", {"member": member, "message": message})
