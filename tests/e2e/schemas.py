"""Values of a JSON schema, as Hypothesis strategies: of the keywords that our own description uses;
others are refused, so that a new one is not left out in silence."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
FIELDS_MAX = 4
"""Optional ones in one object: with more, nearly all bodies break a rule between fields."""
LENGTH_MAX = 3
"""Of arrays."""
NUMBER_MAX = 10**6
"""Of what the schema does not bound."""
WORDS = ("title", "description", "default", "discriminator")


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """`schema` holds no references."""
    rest = {key: value for key, value in schema.items() if key not in WORDS}
    if "enum" in rest:
        return st.sampled_from(rest["enum"])
    if "anyOf" in rest:
        return st.one_of([values(option) for option in rest["anyOf"]])
    match rest.pop("type", None):
        case None:
            assert not rest
            return ANYTHING
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(rest.get("minimum", -NUMBER_MAX), rest.get("maximum", NUMBER_MAX))
        case "number":
            return _numbers(**rest)
        case "string":
            return _strings(**rest)
        case "array":
            return _arrays(**rest)
        case "object":
            return _objects(**rest)
        case other:
            raise AssertionError(other)


def _numbers(
    minimum: float = -NUMBER_MAX, maximum: float = NUMBER_MAX, exclusiveMinimum: float | None = None
) -> st.SearchStrategy[float]:
    if exclusiveMinimum is None:
        return st.floats(minimum, maximum)
    return st.floats(exclusiveMinimum, maximum, exclude_min=True)


def _strings(
    minLength: int = 0, maxLength: int = 20, pattern: str | None = None
) -> st.SearchStrategy[str]:
    if pattern is not None:
        return st.from_regex(pattern.replace("$", r"\Z"))
    return st.text(min_size=minLength, max_size=min(maxLength, minLength + 20))


def _arrays(
    items: dict[str, Any], minItems: int = 0, maxItems: int = LENGTH_MAX
) -> st.SearchStrategy[list[Any]]:
    return st.lists(values(items), min_size=minItems, max_size=maxItems)


def _objects(
    properties: dict[str, Any] | None = None,
    required: tuple[str, ...] = (),
    additionalProperties: Any = True,
    propertyNames: dict[str, Any] | None = None,
    maxProperties: int = LENGTH_MAX,
) -> st.SearchStrategy[dict[str, Any]]:
    if properties is None:
        assert isinstance(additionalProperties, dict)
        keys, most = _strings(**(propertyNames or {})), min(maxProperties, LENGTH_MAX)
        return st.dictionaries(keys, values(additionalProperties), max_size=most)
    assert additionalProperties is False
    fields = {name: values(schema) for name, schema in properties.items()}
    always = {name: fields.pop(name) for name in required}

    def some(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({**always, **{name: fields[name] for name in names}})

    if not fields:
        return st.fixed_dictionaries(always)
    names = st.lists(st.sampled_from(sorted(fields)), max_size=FIELDS_MAX, unique=True)
    return names.flatmap(some)
