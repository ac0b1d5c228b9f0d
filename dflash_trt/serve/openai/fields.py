"""The kinds of fields that requests are made of: what is taken, what is taken without effect, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_ID = 2**31 - 1  # of a token

Ignored = Annotated[Any, Field(description="Taken, without effect.")]
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Count = Annotated[int, Field(ge=1, le=MAX_ID)]


class Known(BaseModel):
    """An object that takes no field it does not know, so that a misspelt one does not pass for its default.

    Values are taken as they are: "1" is no number, and 1 is not true.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _knows(cls, value: Any) -> Any:
        """Before anything else, and one is enough: pydantic would collect an error for each of a million."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise refused("unknown_parameter", "it is not known; look for a typing error", field=name)
        return value


class Only:
    """As an annotation: a field that would change the answer in a way that is not supported. Neutral values pass.

    `instead` says what to do. null is neutral always.
    """

    def __init__(self, *neutral: Any, instead: str):
        self._neutral, self._instead = (None, *neutral), instead

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self._neutral), "description": f"Other values are not supported: {self._instead}."}

    def _check(self, value: Any) -> Any:
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self._neutral):
            return value
        raise refused("unsupported_parameter", f"this value is not supported; {self._instead}")


def refused(code: str, message: str, *, field: str | None = None) -> PydanticCustomError:
    """What a validator raises. The error is in `field` of the object that is validated, if given."""
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})
