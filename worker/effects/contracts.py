"""JSON Schema contracts of what crosses the border of this program: inputs and outputs of extensions, protocols, tools
and models.

Schemas are those of a compiled document, so they are known to compile, but for those that a server tells of its tools.
They are read as the compiler reads them: always as Draft 2020-12, whatever `$schema` says, and a reference never leaves
its schema.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from agentctl.store.canonical import canonical

if TYPE_CHECKING:
    import jsonschema_rs

MAX_MESSAGE: Final = 300
_KNOWN: Final = 256

_validators: OrderedDict[str, jsonschema_rs.Draft202012Validator] = OrderedDict()


def mismatch(schema: Any, value: Any) -> str | None:
    """Why `value` does not fit `schema` (Draft 2020-12), with the place where, or None when it does.

    Raises `ValueError` for a schema that does not compile.
    """
    if schema is True:
        return None
    import jsonschema_rs

    text = canonical(schema)
    validator = _validators.get(text)
    if validator is None:
        try:
            validator = jsonschema_rs.Draft202012Validator(schema, retriever=_refuse)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise ValueError(str(error).split("\n", 1)[0]) from error
        _validators[text] = validator
        if len(_validators) > _KNOWN:
            _validators.popitem(last=False)
    found = next(iter(validator.iter_errors(value)), None)
    if found is None:
        return None
    place = "/".join(str(part) for part in found.instance_path)
    return (f"{place}: " if place else "") + found.message[:MAX_MESSAGE]


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is outside this schema")
