"""Every private or version-dependent import of PyTorch and Triton, in one place.

Functions import lazily, so that importing onepass stays cheap. Tested pairs: torch 2.11 with Triton 3.6, 2.13 with 3.7,
2.14 with 3.8, 2.15 with 3.9.
"""

# ruff: noqa: F401, what is imported here is what the rest of the package uses
from .graphs import (
    constant_tensor,
    data_dependent_errors,
    decompositions,
    fake_mode,
    fake_symbol,
    filling_call,
    is_fake,
    pytree_flatten,
    pytree_unflatten,
    raw_stream,
    shape_guards,
    size_expression,
    size_factors,
    size_hint,
    size_symbols,
    trace_graph,
    watching,
    without_mutations,
)
from .inductor import (
    NEWEST_TORCH,
    OLDEST_TORCH,
    as_configured,
    compile_by_inductor,
    configure,
    configured_partitioner,
    configured_passes,
    given_away,
    graph_pass,
    inductor_options,
    inductor_trouble,
    is_our_pass,
    max_autotune,
    partitioner,
    reset_cuda_graphs,
    run_as_is,
    trace_artifact,
)
from .kernels import (
    TRITON_PAIRS,
    InterpreterParts,
    cuda_driver_level,
    cuobjdump,
    gluon_language,
    is_out_of_resources,
    ptxas,
    triton,
    triton_compile,
    triton_files,
    triton_interpreter,
    triton_launcher,
    triton_pair,
    triton_toolchain,
    triton_usage,
    triton_used,
)
