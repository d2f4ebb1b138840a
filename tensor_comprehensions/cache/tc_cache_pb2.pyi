from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Key(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("record", "fields")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    record: str
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    def __init__(self, record: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Value
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("flag", "number", "real", "text", "list", "pipeline", "options")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    number: int
    real: float
    text: str
    list: List
    pipeline: str
    options: Options
    def __init__(self, flag: bool = ..., number: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., list: _Optional[_Union[List, _Mapping]] = ..., pipeline: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class List(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("options", "seconds", "validated", "samples", "spread", "spelling", "provenance")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VALIDATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    SPELLING_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    options: Options
    seconds: float
    validated: bool
    samples: int
    spread: float
    spelling: str
    provenance: Provenance
    def __init__(self, options: _Optional[_Union[Options, _Mapping]] = ..., seconds: _Optional[float] = ..., validated: bool = ..., samples: _Optional[int] = ..., spread: _Optional[float] = ..., spelling: _Optional[str] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("versions", "tuner", "time")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TUNER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Part]
    tuner: str
    time: int
    def __init__(self, versions: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., tuner: _Optional[str] = ..., time: _Optional[int] = ...) -> None: ...

class Tuning(_message.Message):
    __slots__ = ("key", "measurements")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    measurements: _containers.RepeatedCompositeFieldContainer[Measurement]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., measurements: _Optional[_Iterable[_Union[Measurement, _Mapping]]] = ...) -> None: ...

class Collection(_message.Message):
    __slots__ = ("tunings",)
    TUNINGS_FIELD_NUMBER: _ClassVar[int]
    tunings: _containers.RepeatedCompositeFieldContainer[Tuning]
    def __init__(self, tunings: _Optional[_Iterable[_Union[Tuning, _Mapping]]] = ...) -> None: ...
