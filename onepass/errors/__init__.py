"""Every error a user can meet: what happened, where, and what to do.

Each class holds an error code and a message template; the code that raises it fills in the fields. Codes are grouped by
stage: 1xx capture, 2xx planning, 3xx code generation and compilation, 4xx tuning, 5xx caches, 6xx calls, 7xx whole models under
torch.compile, 8xx tools, 9xx unexpected exceptions.
"""

from __future__ import annotations

from .base import InternalError, OnepassError, OnepassWarning, TooManySteps, printable, text_of, warn
from .call import BadArgument, InvalidShape, MixedDevices, NeedsGrad, NotWarmedUp, UnsupportedDevice, UnsupportedTorchMode
from .capture import (
    BitReinterpretation,
    CaptureTooLong,
    ChangesState,
    ClosureTensor,
    DataDependent,
    IgnoredArgument,
    IntegerDivisionByZero,
    MetadataMismatch,
    Mutation,
    NotTraceable,
    NumberOutOfRange,
    OverlappingElements,
    Randomness,
    ResultOnOtherDevice,
    SymbolicAxis,
    UnguardedState,
    UnsupportedDtype,
    UnsupportedLayout,
    UnsupportedOp,
    UnsupportedReturn,
    UnsupportedView,
)
from .compile import (
    CompileFailed,
    CompilerExited,
    CompilerNotStarted,
    CompilerProtocolError,
    CompilerTimedOut,
    CompilerUnavailable,
    DoesNotFit,
    IllegalProgram,
    ProcessExiting,
    TritonMissing,
    UnsupportedOnDevice,
)
from .kernel import (
    AccessOutOfBounds,
    BarrierInitTwice,
    BarrierLeftBehind,
    BarrierNotInitialized,
    BlockMismatch,
    CopyLeftBehind,
    CopyOutOfBounds,
    ExpectedBytesDiffer,
    KernelFault,
    MissingFence,
    NeverPublished,
    NotForTma,
    NotModeled,
    OutsideAllocation,
    RefillBeforeDrain,
    SharedMemoryExceeded,
    StagingReused,
    UseBeforeArrival,
    WaitsForever,
    WrongPhase,
)
from .model import (
    BadSetting,
    GraphFallback,
    InputsOverwritten,
    NoEagerKernel,
    NoReproducer,
    NotDeterministic,
    NothingToCompare,
    PythonWrapperRequired,
    RaisedFailure,
    RecomputeSkipped,
    RegionFallback,
    RewriteFailed,
    SeededRandom,
    StepFailed,
    UnknownSetting,
    UntestedTorch,
    WrongAnswer,
)
from .plan import CyclicKernels, IllegalSchedule, NoPlan, PlanTooLong, SimplifyTooLong
from .store import CalibrationNotSaved, EntryQuarantined, ImplausibleMeasurement, NoGpu, SourcesNotKept, StoreUnusable
from .tools import (
    BadResults,
    BadSpec,
    CannotResume,
    GpuRequired,
    ModelNotTraced,
    NotMeasured,
    ParseError,
    PlotsNeedMatplotlib,
    SystemRefused,
    TooManyCharts,
    UnknownDevice,
    UnknownWorkload,
    UsersCodeFailed,
)

# fmt: off
__all__ = [
    "AccessOutOfBounds", "BadArgument", "BadResults", "BadSetting", "BadSpec", "BarrierInitTwice", "BarrierLeftBehind",
    "BarrierNotInitialized", "BitReinterpretation", "BlockMismatch", "CalibrationNotSaved", "CannotResume", "CaptureTooLong",
    "ChangesState", "ClosureTensor", "CompileFailed", "CompilerExited", "CompilerNotStarted", "CompilerProtocolError",
    "CompilerTimedOut", "CompilerUnavailable", "CopyLeftBehind", "CopyOutOfBounds", "CyclicKernels", "DataDependent",
    "DoesNotFit", "EntryQuarantined", "ExpectedBytesDiffer", "GpuRequired", "GraphFallback", "IgnoredArgument",
    "IllegalProgram", "IllegalSchedule", "ImplausibleMeasurement", "InputsOverwritten", "IntegerDivisionByZero",
    "InternalError", "InvalidShape", "KernelFault", "MetadataMismatch", "MissingFence", "MixedDevices", "ModelNotTraced",
    "Mutation", "NeedsGrad", "NeverPublished", "NoGpu", "NoEagerKernel", "NoPlan", "NoReproducer", "NotDeterministic", "NotForTma",
    "NotMeasured", "NotModeled", "NotTraceable", "NotWarmedUp", "NothingToCompare", "NumberOutOfRange", "OnepassError",
    "OnepassWarning", "OutsideAllocation", "OverlappingElements", "ParseError", "PlanTooLong", "PlotsNeedMatplotlib",
    "ProcessExiting", "PythonWrapperRequired", "RaisedFailure", "Randomness", "RecomputeSkipped", "RefillBeforeDrain",
    "RegionFallback", "ResultOnOtherDevice", "RewriteFailed", "SeededRandom", "SharedMemoryExceeded", "SimplifyTooLong",
    "SourcesNotKept", "StagingReused", "StepFailed", "StoreUnusable", "SymbolicAxis", "SystemRefused", "TooManyCharts",
    "TooManySteps", "TritonMissing", "UnguardedState", "UnknownDevice", "UnknownSetting", "UnknownWorkload",
    "UnsupportedDevice", "UnsupportedDtype", "UnsupportedLayout", "UnsupportedOnDevice", "UnsupportedOp", "UnsupportedReturn",
    "UnsupportedTorchMode", "UnsupportedView", "UntestedTorch", "UseBeforeArrival", "UsersCodeFailed", "WaitsForever",
    "WrongAnswer", "WrongPhase", "printable", "text_of", "warn",
]
# fmt: on
