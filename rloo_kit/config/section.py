"""Building blocks of a run's configuration: a strict pydantic model, and keys that map to `RLOOConfig` arguments."""

from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rloo_kit.config.messages import accepts_bool, describe_type, explain_error
from rloo_kit.errors import ConfigError


class TrlDefault(NamedTuple):
    """TRL's default if it differs from the kit's, and why. `RLOOConfig`, a drop-in, keeps TRL's."""

    value: Any
    reason: str


def key(
    default: Any,
    description: str,
    *,
    argument: str | None = None,
    trl: TrlDefault | None = None,
    follows: str | None = None,
    **bounds: Any,
) -> Any:
    """A key with a default.

    Args:
        argument: its name in `RLOOConfig`; keys of `rloo:` have the same name there.
        trl: the default in `RLOOConfig`, if it differs.
        follows: the default in words, if other keys decide it (`config/derived.py`).
        bounds: those of pydantic's `Field`.
    """
    extra: dict[str, Any] = {"argument": argument, "trl": trl, "follows": follows}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


def declared(field: FieldInfo, name: str) -> Any:
    """`argument`, `trl` or `follows` of a key; None if it has none."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


class Section(BaseModel):
    """A strict group of keys: unknown keys, booleans for numbers, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())
    prefix: ClassVar[str] = ""  # of its keys, for errors on assignment
    all_are_arguments: ClassVar[bool] = False  # of `RLOOConfig`, under their own names

    @classmethod
    def arguments(cls) -> dict[str, str]:
        """The keys that are arguments of `RLOOConfig`, by their names there."""
        named = {key: declared(field, "argument") for key, field in cls.model_fields.items()}
        return {name or key: key for key, name in named.items() if name or cls.all_are_arguments}

    def to_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `RLOOConfig` from the keys that are set in this section and its subsections."""
        found = {name: value for name, key in self.arguments().items() if (value := getattr(self, key)) is not None}
        for _, value in self:
            found |= value.to_arguments() if isinstance(value, Section) else {}
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, values: Any) -> Any:
        """`num_iterations: true` would be read as 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if isinstance(value, bool) and field is not None and not accepts_bool(field.annotation):
                raise ValueError(f"{key} is {str(value).lower()}; it takes {describe_type(field.annotation)}")
        return values

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign `value` to the key `name` after the checks of a file; raises ConfigError and keeps the old value."""
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        try:
            checked = type(self).model_validate({**dict(self), name: value})
        except ValidationError as error:
            faults = [explain_error(entry, type(self), self.prefix) for entry in error.errors()]
            raise ConfigError("\n".join(faults)) from None
        super().__setattr__(name, getattr(checked, name))
