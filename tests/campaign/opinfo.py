"""Every sample that torch's own tests have for the ops onepass captures: right, or refused with a code.

python -m tests.campaign.opinfo --log opinfo.jsonl          # all of float32, and evenly spaced samples of other types
python -m tests.campaign.opinfo --log opinfo.jsonl --all    # every sample of every type
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .checks import Finding, fault
from .compare import Results, Truth, compared, moved, precision_of
from .graph import default_float64
from .opinfo_entries import entries, title

WHOLE = torch.float32  # every sample of this type is run
OTHERS = (torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.float64, torch.int32, torch.int8, torch.uint8)
MOST = 4  # samples of an op in each other type, unless --all is given


def samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The arguments torch tests an op with; none if the op does not take the type."""
    if dtype not in info.supported_dtypes("cpu"):
        return
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception:  # a sample that this build of torch cannot make
        return


def drawn(count: int, dtype: torch.dtype, shift: int, everything: bool) -> list[int]:
    """Which of `count` samples are run: all of float32; of another type at most MOST, evenly spaced, with an offset that differs
    from type to type, so that all types together cover more of them."""
    if everything or dtype == WHOLE or count <= MOST:
        return list(range(count))
    return [(k * count // MOST + shift) % count for k in range(MOST)]


def as_function(info: Any, sample: Any) -> tuple[Callable[..., Results], list[torch.Tensor]]:
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
    """The same sample with every floating type replaced by float64."""
    wide = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
    kwargs = {n: wide.get(v, v) if isinstance(v, torch.dtype) else v for n, v in sample.kwargs.items()}
    return as_function(info, type(sample)(sample.input, args=sample.args, kwargs=kwargs))


def check_sample(info: Any, dtype: torch.dtype, sample: Any, number: int) -> Finding:
    """The outcome of a sample."""
    import onepass

    function, tensors = as_function(info, sample)
    try:
        eager = function(*(t.clone() for t in tensors))
    except Exception as error:  # torch refuses its own sample
        return Finding(number, "skipped", str(error))
    try:
        actual = tuple(onepass.fuse(function)(*(t.clone() for t in tensors)))
    except Exception as error:
        return fault(number, error)
    exact, _ = widest(info, sample)

    def reference(step: float | None, draw: int) -> Results:
        inputs = [moved(t.clone(), step, draw) for t in tensors]
        with default_float64():
            return exact(*inputs)

    overlaps = any(t.numel() > 1 and 0 in t.stride() for t in tensors)
    kind, detail, output = compared(actual, Truth(eager, reference, precision_of({dtype}), overlaps=overlaps))
    return Finding(number, kind, detail and f"output {output}: {detail}")


def run(log: Path, only: str = "", everything: bool = False) -> None:
    """The samples of all ops: float32 first, then the other types. Ops and types that the log already holds are left out."""
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    done = {(line["op"], line["dtype"]) for line in lines if line["whole"] or not everything}
    chosen = [info for info in entries() if only in title(info)]
    with log.open("a") as out:
        for shift, dtype in enumerate((WHOLE, *OTHERS)):
            for info in chosen:
                if (title(info), str(dtype)) not in done:
                    out.write(json.dumps(_line(info, dtype, shift, everything)) + "\n")
                    out.flush()


def _line(info: Any, dtype: torch.dtype, shift: int, everything: bool) -> dict[str, Any]:
    """The log's line for an op and a type."""
    given = list(samples(info, dtype))
    at = drawn(len(given), dtype, shift, everything)
    found = [check_sample(info, dtype, given[k], k) for k in at]
    refused = Counter(f.where for f in found if f.kind == "refused")
    return {
        "op": title(info),
        "dtype": str(dtype),
        "whole": len(at) == len(given),
        "kinds": Counter(f.kind for f in found),
        "refused": refused,
        "bad": [f.to_json() for f in found if f.is_bad],
    }


def main() -> int:
    """The command."""
    import argparse

    from .graphs import quiet

    parser = argparse.ArgumentParser(prog="python -m tests.campaign.opinfo")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--only", default="", help="ops whose names contain this")
    parser.add_argument("--all", action="store_true", help="every sample of every type")
    given = parser.parse_args()
    quiet()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        run(given.log, given.only, given.all)
    found = {(line["op"], line["dtype"]): line for line in map(json.loads, given.log.read_text().splitlines())}
    return show(list(found.values()))


def show(lines: list[dict[str, Any]]) -> int:
    """Print what was found; 1 if any sample was neither right nor refused."""
    total, refused = Counter[str](), Counter[str]()
    for line in lines:
        total.update(line["kinds"])
        refused.update(line["refused"])
        for bad in line["bad"]:
            what = f"{bad['kind']} {bad['where']} {bad['detail'][:200]}"
            sys.stdout.write(f"{line['op']} {line['dtype']} sample {bad['seed']}: {what}\n")
    sys.stdout.write(f"{len({line['op'] for line in lines})} ops, {sum(total.values())} samples: {dict(total)}\n")
    sys.stdout.write(f"refused: {dict(refused.most_common())}\n")
    return 1 if any(line["bad"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
