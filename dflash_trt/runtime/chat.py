"""Chat templates: the Jinja programs by which a model says how it wants a conversation laid out.

They run sandboxed, with the names and extensions that transformers gives them (`apply_chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.errors import UserError


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, where: Path):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        self._where = where
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template cannot be compiled: {error}", where=where) from None

    @classmethod
    def read(cls, directory: Path) -> ChatTemplate | None:
        """The template of chat_template.jinja or, in older models, of tokenizer_config.json; None if there is none."""
        config = _read_config(directory / "tokenizer_config.json")
        where = directory / "chat_template.jinja"
        source = where.read_text(encoding="utf-8") if where.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        special_tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        return cls(source, special_tokens, where=where)

    def render(self, messages: Iterable[dict[str, Any]], **variables: Any) -> str:
        """The conversation as text, up to where the assistant answers. Raises UserError if the template refuses it."""
        names = {"messages": list(messages), "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._template.render(**self._special_tokens, **names | variables)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses the messages: {error}", where=self._where) from None


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"not valid JSON: {error}", where=path, fix="copy the file from the target again") from None


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Unlike Jinja's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
