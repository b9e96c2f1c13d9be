"""Errors of whole models under torch.compile: ONEPASS-701 to 717."""

from __future__ import annotations

from .base import OnepassError


class RegionFallback(OnepassError):
    code = "ONEPASS-701"
    message = (
        "Region {region} ({lines}) could not be {stage}: {error} Inductor computes it instead: results are correct, but "
        "not faster. To report this, attach {repro}. To skip the region: options={{'skip': ['{region}']}}. To "
        "raise instead: ONEPASS_ON_ERROR=raise."
    )


class GraphFallback(OnepassError):
    code = "ONEPASS-702"
    message = (
        "onepass claimed no region of a {phase} graph ({lines}) because of this error: {error} Inductor compiles the whole "
        "graph instead: results are correct, but not faster. To report this, attach {repro}. To raise instead: "
        "ONEPASS_ON_ERROR=raise."
    )


class RecomputeSkipped(OnepassError):
    code = "ONEPASS-709"
    message = (
        "onepass did not change what a training graph saves for its backward because of this error: {error} Results are "
        "correct, but more memory is used and moved. To skip this step: options={{'recompute': False}}. To raise instead: "
        "ONEPASS_ON_ERROR=raise."
    )


class WrongAnswer(OnepassError):
    code = "ONEPASS-703"
    message = (
        "Region {region}, output {output}: {detail}. This is a bug in onepass; please report it with {repro}. Skip the "
        "region until it is fixed: options={{'skip': ['{region}']}}."
    )


class UnknownSetting(OnepassError):
    code = "ONEPASS-704"
    message = "There is no setting {name!r}. Known: {known}."


class BadSetting(OnepassError):
    code = "ONEPASS-705"
    message = "The setting {name} cannot be {given!r}: {detail}."


class UntestedTorch(OnepassError):
    code = "ONEPASS-706"
    message = (
        "onepass leaves everything to Inductor: {detail}. onepass is tested with torch {oldest} to {newest}. Install one of "
        'these, or use backend="inductor" to silence this warning.'
    )


class NoReproducer(OnepassError):
    code = "ONEPASS-707"
    message = "No reproducer could be written to {folder}: {detail}. Set another folder in ONEPASS_REPRO_DIR."


class RewriteFailed(OnepassError):
    code = "ONEPASS-708"
    message = "A graph could not be rewritten: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class SeededRandom(OnepassError):
    code = "ONEPASS-710"
    message = (
        '{op} ({lines}) turns a seed into random numbers, which only Inductor\'s code generation can do. With rest="eager" '
        'the forward and the recomputed backward would draw different numbers. Set rest to "inductor".'
    )


class PythonWrapperRequired(OnepassError):
    code = "ONEPASS-711"
    message = (
        "onepass claimed no region of the {phase} graph at {lines}, because {by} compiles it, and that cannot call onepass "
        "kernels yet. Inductor compiles all of it: results are correct, but not faster, and the compiled code does not need "
        "onepass. To silence this warning, call onepass.disable() first, or set ONEPASS_DISABLE=1."
    )


class NotDeterministic(OnepassError):
    code = "ONEPASS-712"
    message = (
        "{what} gives different results each time, even without onepass: {detail}. So bisect cannot blame any region. "
        "Create everything inside the function (model, data, optimizer), and use only seeded random generators."
    )


class StepFailed(OnepassError):
    code = "ONEPASS-713"
    message = (
        "{what} could not be run {how}: {error} There is nothing to compare with until it runs there. A model may "
        "need other inputs, or options (--option)."
    )


class NothingToCompare(OnepassError):
    code = "ONEPASS-714"
    message = "{what} returns nothing to compare: {detail}. Return a loss or tensors, or (step, inputs), where step returns them."


class InputsOverwritten(OnepassError):
    code = "ONEPASS-715"
    message = (
        "Region {region} ({lines}) failed after its first call: {error} It writes outputs over inputs, which may already be "
        "overwritten, so no fallback can compute this call. To keep the inputs, so that Inductor can take over: "
        "options={{'in_place': False}}. To skip the region: options={{'skip': ['{region}']}}."
    )


class RaisedFailure(OnepassError):
    code = "ONEPASS-716"
    message = (
        '{what} ({lines}) could not be {stage}: {error} Nothing takes its place, because on_error is "raise". With '
        "ONEPASS_ON_ERROR=warn, Inductor computes it, and a reproducer is written."
    )


class NoEagerKernel(OnepassError):
    code = "ONEPASS-717"
    message = (
        'The rest of a graph cannot run op by op: {error} With rest="eager", torch runs the ops that Inductor decomposes the '
        'graph into, and has no kernel for one of them. Use rest="inductor".'
    )
