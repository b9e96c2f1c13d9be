"""Every sample that torch's own tests have for the ops onepass captures: right, or refused with a code.

    python -m tests.campaign.opinfo --log opinfo.jsonl
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .checks import Finding, fault
from .compare import Results, Truth, compared, moved, precision_of
from .graph import default_float64

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
          torch.bool)
# The names in torch's table of ops that reduce, work on single elements, or view.
NAMES = frozenset(re.split(r"\s+", """
    abs add addcdiv addcmul all amax amin any argmax argmin as_strided bitwise_and bitwise_not bitwise_or bitwise_xor
    broadcast_to cat ceil chunk clamp clamp_max clamp_min clone contiguous cos diagonal div eq erf exp exp2 expand expand_as
    expm1 fill flatten floor floor_divide fmod full_like gather ge gt index_select isclose isfinite isinf isnan le lerp
    linalg.vector_norm log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor logsumexp lt
    masked_fill max maximum mean min minimum mul nan_to_num nanmean nansum narrow ne neg new_full new_ones new_zeros
    nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.cross_entropy
    nn.functional.elu nn.functional.gelu nn.functional.group_norm nn.functional.hardsigmoid nn.functional.hardswish
    nn.functional.hardtanh nn.functional.huber_loss nn.functional.instance_norm nn.functional.kl_div nn.functional.l1_loss
    nn.functional.layer_norm nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.mse_loss nn.functional.nll_loss
    nn.functional.normalize nn.functional.pad nn.functional.relu nn.functional.relu6 nn.functional.rms_norm nn.functional.silu
    nn.functional.smooth_l1_loss nn.functional.softmin nn.functional.softplus nn.functional.softsign nn.functional.tanhshrink
    norm ones_like permute positive pow prod ravel reciprocal remainder repeat reshape round rsqrt rsub scatter scatter_add
    scatter_reduce select select_scatter sgn sigmoid sign sin slice slice_scatter softmax split split_with_sizes sqrt square
    squeeze stack std std_mean sub sum take_along_dim tanh transpose tril triu true_divide trunc unbind unfold unsqueeze var
    var_mean view view_as where zero_ zeros_like
""".strip()))


def entries() -> list[Any]:
    """torch's descriptions of those ops, all variants of each."""
    if importlib.util.find_spec("expecttest") is None:  # torch's test helpers import it, and what is used of them does not need it
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if info.name in NAMES or info.aten_name in NAMES]


def samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The arguments torch tries an op on; none where it does not take the type."""
    if dtype not in info.supported_dtypes("cpu"):
        return
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception:  # a sample that this build of torch cannot make
        return


def called(info: Any, sample: Any) -> tuple[Callable[..., Results], list[torch.Tensor]]:
    """A sample as a function of its tensors."""
    leaves, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> Results:
        filled = list(leaves)
        for k, tensor in zip(at, tensors, strict=True):
            filled[k] = tensor
        first, args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return tuple(torch.utils._pytree.tree_leaves(info.op(first, *args, **kwargs)))

    return function, [leaves[k] for k in at]


def widest(info: Any, sample: Any) -> tuple[Callable[..., Results], list[torch.Tensor]]:
    """The same sample where every floating type it names is float64."""
    wide = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
    kwargs = {n: wide.get(v, v) if isinstance(v, torch.dtype) else v for n, v in sample.kwargs.items()}
    return called(info, type(sample)(sample.input, args=sample.args, kwargs=kwargs))


def one(info: Any, dtype: torch.dtype, sample: Any, number: int) -> Finding:
    """What came of a sample."""
    import onepass

    function, tensors = called(info, sample)
    try:
        eager = function(*(t.clone() for t in tensors))
    except Exception as error:  # torch refuses its own sample
        return Finding(number, "skipped", str(error))
    try:
        mine = tuple(onepass.fuse(function)(*(t.clone() for t in tensors)))
    except Exception as error:
        return fault(number, error)
    exact, _ = widest(info, sample)

    def reference(step: float | None, draw: int) -> Results:
        inputs = [moved(t.clone(), step, draw) for t in tensors]
        with default_float64():
            return exact(*inputs)

    overlaps = any(t.numel() > 1 and 0 in t.stride() for t in tensors)
    kind, detail, output = compared(mine, Truth(eager, reference, precision_of({dtype}), overlaps=overlaps))
    return Finding(number, kind, detail and f"output {output}: {detail}")


def run(log: Path, only: str = "") -> Counter[str]:
    """All samples of all ops, those the log already holds left out."""
    done = {(line["op"], line["dtype"]) for line in map(json.loads, log.read_text().splitlines())} if log.exists() else set()
    counts: Counter[str] = Counter()
    with log.open("a") as out:
        for info in entries():
            for dtype in DTYPES:
                key = f"{info.name}.{info.variant_test_name}".rstrip("."), str(dtype)
                if key in done or only not in key[0]:
                    continue
                found = [one(info, dtype, sample, k) for k, sample in enumerate(samples(info, dtype))]
                kinds = Counter(f.kind for f in found)
                bad = [f.to_json() for f in found if f.is_bad]
                counts.update(kinds)
                out.write(json.dumps({"op": key[0], "dtype": key[1], "kinds": kinds, "bad": bad}) + "\n")
                out.flush()
    return counts


def main() -> int:
    """The command."""
    import argparse

    from .graphs import quiet

    parser = argparse.ArgumentParser(prog="python -m tests.campaign.opinfo")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--only", default="", help="ops whose names contain this")
    given = parser.parse_args()
    quiet()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        run(given.log, given.only)
    lines = [json.loads(line) for line in given.log.read_text().splitlines()]
    total: Counter[str] = Counter()
    for line in lines:
        total.update(line["kinds"])
        for bad in line["bad"]:
            what = f"{bad['kind']} {bad['where']} {bad['detail'][:200]}"
            sys.stdout.write(f"{line['op']} {line['dtype']} sample {bad['seed']}: {what}\n")
    sys.stdout.write(f"{len({line['op'] for line in lines})} ops, {sum(total.values())} samples: {dict(total)}\n")
    return 1 if any(line["bad"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
