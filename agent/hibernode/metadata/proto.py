"""Message classes and methods of the ``.proto`` files beside this module, made when they are first used.

No generated code: it would register model_express.p2p in the process's one pool of descriptors, where the
stock client's has to be alone, and the .proto files would no longer be what runs. Each file has a pool of its
own here. The parser knows what our files use (messages, enums, oneof, optional, repeated, map, services), and
the tests compare its result with the descriptors in the stock client.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TOKEN: Final = re.compile(r'//[^\n]*|"[^"]*"|[\w.]+|[^\s\w]')
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "float": _Field.TYPE_FLOAT,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its path on the wire, the classes of its messages, whether many answers come."""

    path: str
    request: Any
    response: Any
    streams: bool


@dataclass(frozen=True, slots=True)
class Proto:
    """One file: message classes by name, methods by service and name, its descriptor."""

    messages: Mapping[str, Any]
    services: Mapping[str, Mapping[str, Method]]
    file: descriptor_pb2.FileDescriptorProto

    def __getattr__(self, name: str) -> Any:
        """Return the class of a message."""
        try:
            return self.messages[name]
        except KeyError:
            raise AttributeError(f"{self.file.name} has no message {name}") from None


@cache
def load(name: str) -> Proto:
    """Load ``name.proto``."""
    path = Path(__file__).with_name(f"{name}.proto")
    file = parse(path.name, path.read_text(encoding="utf-8"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    messages = {full.removeprefix(f"{file.package}."): found for full, found in classes.items()}
    services = {
        service.name: {
            method.name: Method(
                f"/{file.package}.{service.name}/{method.name}",
                classes[method.input_type.removeprefix(".")],
                classes[method.output_type.removeprefix(".")],
                method.server_streaming,
            )
            for method in service.method
        }
        for service in file.service
    }
    return Proto(messages, services, file)


def parse(name: str, text: str) -> descriptor_pb2.FileDescriptorProto:
    """Turn the text of a file into its descriptor.

    :raises ValueError: it has something that this parser does not know.
    """
    tokens = [token for token in _TOKEN.findall(text) if not token.startswith("//")]
    parser = _Parser(iter(tokens), descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3"))
    return parser.run()


class _Parser:
    """Descends through the tokens of a file."""

    def __init__(self, tokens: Iterator[str], file: descriptor_pb2.FileDescriptorProto) -> None:
        self._tokens, self._file = tokens, file

    def run(self) -> descriptor_pb2.FileDescriptorProto:
        file = self._file
        for word in self._tokens:
            if word == "syntax":
                self._expect("=", '"proto3"', ";")
            elif word == "package":
                file.package = next(self._tokens)
                self._expect(";")
            elif word in ("message", "enum", "service"):
                name = next(self._tokens)
                self._expect("{")
                getattr(self, f"_{word}")(name)
            else:
                raise ValueError(f"{file.name}: {word!r} is not known here")
        self._resolve()
        return file

    def _expect(self, *words: str) -> None:
        for word in words:
            if (found := next(self._tokens)) != word:
                raise ValueError(f"{self._file.name}: {found!r} stands where {word!r} is expected")

    def _full(self, name: str) -> str:
        return f".{self._file.package}.{name}"

    def _number(self) -> int:
        self._expect("=")
        number = int(next(self._tokens))
        self._expect(";")
        return number

    def _enum(self, name: str) -> None:
        enum = self._file.enum_type.add(name=name)
        while (word := next(self._tokens)) != "}":
            enum.value.add(name=word, number=self._number())

    def _service(self, name: str) -> None:
        service = self._file.service.add(name=name)
        while (word := next(self._tokens)) != "}":
            if word != "rpc":
                raise ValueError(f"{self._file.name}: {word!r} in a service")
            method = service.method.add(name=next(self._tokens))
            self._expect("(")
            method.input_type = self._full(next(self._tokens))
            self._expect(")", "returns", "(")
            output = next(self._tokens)
            if output == "stream":
                method.server_streaming, output = True, next(self._tokens)
            method.output_type = self._full(output)
            self._expect(")", ";")

    def _message(self, name: str) -> None:
        message = self._file.message_type.add(name=name)
        while (word := next(self._tokens)) != "}":
            if word == "oneof":
                message.oneof_decl.add(name=next(self._tokens))
                self._expect("{")
                while (inner := next(self._tokens)) != "}":
                    self._field(message, inner).oneof_index = len(message.oneof_decl) - 1
            elif word == "map":
                self._expect("<", "string", ",", "string", ">")
                self._map(message)
            elif word == "repeated":
                self._field(message, next(self._tokens)).label = _Field.LABEL_REPEATED
            elif word == "optional":
                self._field(message, next(self._tokens)).proto3_optional = True
            else:
                self._field(message, word)
        # protoc gives each optional field a oneof of its own, after the written ones.
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def _field(
        self, message: descriptor_pb2.DescriptorProto, kind: str
    ) -> descriptor_pb2.FieldDescriptorProto:
        field = message.field.add(name=next(self._tokens), label=_Field.LABEL_OPTIONAL)
        field.number = self._number()
        field.json_name = _camel(field.name, upper=False)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type_name = self._full(kind)
        return field

    def _map(self, message: descriptor_pb2.DescriptorProto) -> None:
        name = next(self._tokens)
        entry = message.nested_type.add(name=f"{_camel(name, upper=True)}Entry")
        entry.options.map_entry = True
        for number, part in enumerate(("key", "value"), 1):
            entry.field.add(
                name=part, json_name=part, number=number, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING
            )
        message.field.add(
            name=name,
            json_name=_camel(name, upper=False),
            number=self._number(),
            label=_Field.LABEL_REPEATED,
            type=_Field.TYPE_MESSAGE,
            type_name=self._full(f"{message.name}.{entry.name}"),
        )

    def _resolve(self) -> None:
        """Tell enums from messages, now that all names are known."""
        enums = {self._full(enum.name) for enum in self._file.enum_type}
        for message in self._file.message_type:
            for field in message.field:
                if not field.HasField("type"):
                    field.type = _Field.TYPE_ENUM if field.type_name in enums else _Field.TYPE_MESSAGE


def _camel(name: str, *, upper: bool) -> str:
    words = [word.capitalize() for word in name.split("_")]
    return "".join(words) if upper else "".join([words[0].lower(), *words[1:]])
