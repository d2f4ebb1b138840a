from tensor_comprehensions.cache import tc_cache_pb2 as _tc_cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Status]
    OK: _ClassVar[Status]
    INVALID: _ClassVar[Status]
    COMPILE_ERROR: _ClassVar[Status]
    COMPILE_TIMEOUT: _ClassVar[Status]
    RUN_TIMEOUT: _ClassVar[Status]
    CRASH: _ClassVar[Status]
    GPU_STICKY: _ClassVar[Status]
    OUT_OF_MEMORY: _ClassVar[Status]
    WRONG_RESULT: _ClassVar[Status]
    NAN: _ClassVar[Status]
    IMPOSSIBLE: _ClassVar[Status]
    SLOW: _ClassVar[Status]
    REFUSED: _ClassVar[Status]

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTHING: _ClassVar[Stage]
    COMPILE: _ClassVar[Stage]
    MEASURE: _ClassVar[Stage]
    EVALUATE: _ClassVar[Stage]
    RACE: _ClassVar[Stage]
UNKNOWN: Status
OK: Status
INVALID: Status
COMPILE_ERROR: Status
COMPILE_TIMEOUT: Status
RUN_TIMEOUT: Status
CRASH: Status
GPU_STICKY: Status
OUT_OF_MEMORY: Status
WRONG_RESULT: Status
NAN: Status
IMPOSSIBLE: Status
SLOW: Status
REFUSED: Status
NOTHING: Stage
COMPILE: Stage
MEASURE: Stage
EVALUATE: Stage
RACE: Stage

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "strides", "values")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("source", "name", "inputs", "initial", "seed")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    source: str
    name: str
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    initial: _containers.RepeatedCompositeFieldContainer[Tensor]
    seed: int
    def __init__(self, source: _Optional[str] = ..., name: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., initial: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class Code(_message.Message):
    __slots__ = ("program", "temporaries", "symbols")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    TEMPORARIES_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    program: bytes
    temporaries: _containers.RepeatedScalarFieldContainer[int]
    symbols: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, program: _Optional[bytes] = ..., temporaries: _Optional[_Iterable[int]] = ..., symbols: _Optional[_Iterable[str]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("version", "stage", "problem", "options", "codes", "device", "fingerprint", "hopeless", "losing", "seconds", "fresh", "folder", "compile_limit", "run_limit", "threads")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_FIELD_NUMBER: _ClassVar[int]
    LOSING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    COMPILE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    RUN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    version: int
    stage: Stage
    problem: Problem
    options: _containers.RepeatedCompositeFieldContainer[_tc_cache_pb2.Options]
    codes: _containers.RepeatedCompositeFieldContainer[Code]
    device: str
    fingerprint: str
    hopeless: float
    losing: float
    seconds: float
    fresh: bool
    folder: str
    compile_limit: float
    run_limit: float
    threads: int
    def __init__(self, version: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., options: _Optional[_Iterable[_Union[_tc_cache_pb2.Options, _Mapping]]] = ..., codes: _Optional[_Iterable[_Union[Code, _Mapping]]] = ..., device: _Optional[str] = ..., fingerprint: _Optional[str] = ..., hopeless: _Optional[float] = ..., losing: _Optional[float] = ..., seconds: _Optional[float] = ..., fresh: bool = ..., folder: _Optional[str] = ..., compile_limit: _Optional[float] = ..., run_limit: _Optional[float] = ..., threads: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("median", "low", "high", "runs", "gain")
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    median: float
    low: float
    high: float
    runs: int
    gain: float
    def __init__(self, median: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., runs: _Optional[int] = ..., gain: _Optional[float] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("version", "status", "message", "timings", "codes", "digest", "fingerprint", "compiling", "running")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    version: int
    status: Status
    message: str
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    codes: _containers.RepeatedCompositeFieldContainer[Code]
    digest: str
    fingerprint: str
    compiling: float
    running: float
    def __init__(self, version: _Optional[int] = ..., status: _Optional[_Union[Status, str]] = ..., message: _Optional[str] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., codes: _Optional[_Iterable[_Union[Code, _Mapping]]] = ..., digest: _Optional[str] = ..., fingerprint: _Optional[str] = ..., compiling: _Optional[float] = ..., running: _Optional[float] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("options", "status", "message", "timing", "digest", "generation", "compiling", "running", "elapsed")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    options: _tc_cache_pb2.Options
    status: Status
    message: str
    timing: Timing
    digest: str
    generation: int
    compiling: float
    running: float
    elapsed: float
    def __init__(self, options: _Optional[_Union[_tc_cache_pb2.Options, _Mapping]] = ..., status: _Optional[_Union[Status, str]] = ..., message: _Optional[str] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., digest: _Optional[str] = ..., generation: _Optional[int] = ..., compiling: _Optional[float] = ..., running: _Optional[float] = ..., elapsed: _Optional[float] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("known", "key")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedCompositeFieldContainer[_tc_cache_pb2.Options]
    key: str
    def __init__(self, known: _Optional[_Iterable[_Union[_tc_cache_pb2.Options, _Mapping]]] = ..., key: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("finalists", "timings", "elapsed")
    FINALISTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    finalists: _containers.RepeatedCompositeFieldContainer[_tc_cache_pb2.Options]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    elapsed: float
    def __init__(self, finalists: _Optional[_Iterable[_Union[_tc_cache_pb2.Options, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., elapsed: _Optional[float] = ...) -> None: ...
