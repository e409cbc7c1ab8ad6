"""YAML to values: PyYAML finds the structure; the type of a dataclass field decides how its text is read. So text stays
as it was typed (`name: yes`, `name: 1e3`) and numbers are what they look like (to PyYAML 3e-3 is text and 010 is 8)."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from .validation import ConfigError, one_line

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # YAML 1.1, as PyYAML
_NULLS = ("null", "~", "")
_MAX_DEPTH = 30  # OmegaConf meets Python's limit of recursion at 80 levels, or sooner if many functions call it
_WORDS = {bool: ("true or false", "true"), int: ("an integer (64 bits)", "3"), float: ("a finite number", "0.1")}


class TypedText(yaml.ScalarNode):
    """A value from the command line: text, unless its key takes a list or a section and it is written as one."""


def parse_yaml(text: str, source: str) -> yaml.Node:
    """The node tree of a YAML text; an empty mapping for an empty text. `source` names it in errors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):  # they make bombs and other types
                problem = "anchors, aliases and tags (& * !) are not read: quote a text that begins so"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=cast(Any, event.start_mark))
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets int() and chr() raise theirs
        mark = getattr(error, "problem_mark", None)
        place = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not readable"
        raise ConfigError(f"{place}: no YAML that can be read here: {one_line(problem)}. Correct it there.") from None
    return node or yaml.MappingNode("", [])


def read_value(node: yaml.Node, kind: Any, key: str, root: type) -> Any:
    """The value of `node` as the annotation `kind` wants it; text for what only OmegaConf converts (Path, Enum …).

    key: the dotted key, "" for the whole file. root: the dataclass of the whole file, for "did you mean".
    """
    if key.count(".") + key.count("[") > _MAX_DEPTH:
        raise ConfigError(f"{one_line(key)}: brackets or sections are nested too deep. Take some levels out.")
    kinds = _alternatives(kind)
    if isinstance(node, TypedText):
        node = _parse_typed(node.value, kinds, key)
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(node, kinds, key, root)
    if isinstance(node, yaml.ScalarNode):
        return _read_scalar(node, kinds, key)
    listed = next((kind for kind in kinds if kind is Any or _origin(kind) in (list, tuple)), None)
    if listed is None:
        raise _wrong_type(node, kinds, key)
    return [read_value(item, _item_kind(listed, i), f"{key}[{i}]", root) for i, item in enumerate(node.value)]


def _parse_typed(text: str, kinds: list[Any], key: str) -> yaml.Node:
    takes_list = any(kind is Any or _origin(kind) in (list, tuple) for kind in kinds)
    takes_section = any(kind is Any or _origin(kind) is dict or is_dataclass(kind) for kind in kinds)
    if (takes_list and text[:1] == "[") or (takes_section and text[:1] == "{"):
        return parse_yaml(text, key)
    if takes_list and "," in text:
        return yaml.SequenceNode("", [yaml.ScalarNode("", part.strip()) for part in text.split(",")])
    return yaml.ScalarNode("", text)


def _read_mapping(node: yaml.MappingNode, kinds: list[Any], key: str, root: type) -> dict[Any, Any]:
    section = next((kind for kind in kinds if kind is Any or is_dataclass(kind) or _origin(kind) is dict), None)
    if section is None:
        raise _wrong_type(node, kinds, key)
    types = _field_types(section) if is_dataclass(section) else None
    name_kind, item_kind = get_args(section) or (str, Any)
    values: dict[Any, Any] = {}
    for name_node, item in node.value:
        inner_key = f"{key}.{_show(name_node)}" if key else _show(name_node)
        name = read_value(name_node, name_kind, inner_key, root)
        if name in values:
            raise ConfigError(f"{inner_key}={_show(item)}: this key stands there twice. Delete one of its lines.")
        if types is not None and "." in name:
            outer, _, inner = _show(name_node).partition(".")
            remedy = f"Write {outer}: and, indented below it, {inner}: {_show(item)}"
            raise ConfigError(f"{inner_key}={_show(item)}: keys with a dot are for the command line. {remedy}")
        if types is not None and name not in types:
            raise _unknown_key(inner_key, item, root)
        values[name] = read_value(item, item_kind if types is None else types[name], inner_key, root)
    return values


def _read_scalar(node: yaml.ScalarNode, kinds: list[Any], key: str) -> Any:
    text: str = node.value
    _refuse_unusable(text, key)
    is_quoted = node.style is not None
    if not is_quoted and text.lower() in _NULLS:
        if NoneType in kinds or Any in kinds:
            return None
        if is_dataclass(kinds[0]):
            return {}  # a section whose keys are all commented out
    elif len(lists := [kind for kind in kinds if kind is not NoneType]) == 1 and _origin(lists[0]) in (list, tuple):
        return [_read_scalar(node, _alternatives(_item_kind(lists[0], 0)), f"{key}[0]")]  # files=a.txt
    if Any in kinds:
        kinds = [str] if is_quoted else [bool, int, float, str]
    if bool in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    number = _number(text, kinds)
    others = [kind for kind in kinds if _origin(kind) not in (*_WORDS, NoneType, list, tuple, dict)]
    if number is None and all(is_dataclass(kind) for kind in others):  # nothing that text could be
        raise _wrong_type(node, kinds, key)
    return text if number is None else number


def _number(text: str, kinds: list[Any]) -> int | float | None:
    """The text as the first of int and float that is among the kinds and fits, else None."""
    with suppress(ValueError):
        if int in kinds and -(2**63) <= int(text) < 2**63:
            return int(text)
    with suppress(ValueError):
        number = float(text)
        if float in kinds and math.isfinite(number):
            return number
        if int in kinds and str not in kinds and number.is_integer() and abs(number) < 2**63:
            return int(number)  # max_steps: 1e5
    return None


def _refuse_unusable(text: str, key: str) -> None:
    if "${" in text:
        raise ConfigError(f"{key}={one_line(text)}: ${{…}} is not replaced by anything. Write the value itself.")
    if text == "???":  # OmegaConf's mark for "no value"
        raise ConfigError(f"{key}=???: is no value. Write the value itself.")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"{key}={one_line(text)}: holds a character that no file can store. Write it without.")


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, the types of a Literal's values, else the type itself."""
    if get_origin(kind) is Literal:
        return [type(value) for value in get_args(kind)]
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _item_kind(kind: Any, index: int) -> Any:
    kinds = [item for item in get_args(kind) if item is not Ellipsis] or [Any]
    return kinds[min(index, len(kinds) - 1)]


def _field_types(section: Any) -> dict[str, Any]:
    types = get_type_hints(section)
    return {item.name: types[item.name] for item in fields(section)}


def _dotted_keys(section: Any, prefix: str = "") -> Iterator[str]:
    for name, kind in _field_types(section).items():
        yield prefix + name
        for alternative in _alternatives(kind):
            if is_dataclass(alternative):
                yield from _dotted_keys(alternative, f"{prefix}{name}.")


def _unknown_key(key: str, node: yaml.Node, root: type) -> ConfigError:
    section, _, name = key.rpartition(".")
    names = {key: key.rpartition(".")[2] for key in _dotted_keys(root)}
    here = [known for known in names if known.rpartition(".")[0] == section]
    while isinstance(node, yaml.MappingNode) and len(node.value) == 1:  # a misspelt section: look at the key in it
        name, node = _show(node.value[0][0]), node.value[0][1]
        key = f"{key}.{name}"
    same = [known for known in names if names[known] == name]
    near = [known for known in here if get_close_matches(name, [names[known]])]
    far = [known for known in names if get_close_matches(name, [names[known]], cutoff=0.8)]
    value = "" if isinstance(node, yaml.MappingNode) else f"={_show(node)}"
    remedy = f"Its keys are: {', '.join(names[known] for known in here)}."
    for close in get_close_matches(key, same or near or far, n=1, cutoff=0):
        remedy = f"Did you mean {close}{value}?"
    return ConfigError(f"{one_line(key)}{value}: there is no such key in {one_line(section or 'the config')}. {remedy}")


def _wrong_type(node: yaml.Node, kinds: list[Any], key: str) -> ConfigError:
    if is_dataclass(kinds[0]):
        names = ", ".join(_field_types(kinds[0]))
        return ConfigError(f"{key}={_show(node)}: {key} is a section. Set its keys ({key}.KEY=VALUE): {names}.")
    known = [_WORDS[kind] for kind in kinds if kind in _WORDS]
    known += [("text", "TEXT")] if str in kinds else []
    known += [("a list", "1,2") for kind in kinds if _origin(kind) in (list, tuple)]
    known += [("null", "null")] if NoneType in kinds else []
    words = " or ".join(words for words, _ in known) or "a single value"
    example = known[0][1] if known else "VALUE"
    remedy = f"Write {example} there" if key.endswith("]") else f"Set {key}={example}"  # an item of a list
    return ConfigError(f"{key}={_show(node)}: must be {words}. {remedy}, for example.")


def _show(node: yaml.Node) -> str:
    """The node as it could be typed, on one short line."""
    if isinstance(node, yaml.ScalarNode):
        return one_line(node.value)
    if isinstance(node, yaml.MappingNode):
        return one_line("{" + ", ".join(f"{_show(name)}: {_show(item)}" for name, item in node.value[:9]) + "}")
    return one_line("[" + ", ".join(map(_show, node.value[:9])) + "]")
