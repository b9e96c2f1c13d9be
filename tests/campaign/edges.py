"""The edge matrix: every kind of op, by type, by extreme shape, by layout and content.

python -m tests.campaign.edges --log edges.jsonl
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .graph import Graph, Input, Step

OPS = {
    "sum last": "{0}.sum(-1)",
    "sum first": "{0}.sum(0)",
    "sum all": "{0}.sum()",
    "mean": "{0}.float().mean(-1, keepdim=True)",
    "amax": "{0}.amax(-1)",
    "argmax": "{0}.argmax(0)",
    "any": "({0} > 0).any(-1)",
    "var": "{0}.float().var(-1, correction=0)",
    "var first": "{0}.float().var(0, correction=0)",
    "softmax": "{0}.float().softmax(-1)",
    "softmax first": "{0}.float().softmax(0).to({0}.dtype)",
    "layer norm": "F.layer_norm({0}.float(), {0}.shape[-1:])",
    "logsumexp": "{0}.float().logsumexp(-1)",
    "both": "({0} * {0}).sum(-1, keepdim=True) + {0}.sum(0)",
    "cat": "torch.cat([{0}, {0} + 1], -1).amax(-1)",
    "shift": "({0}[..., 1:] - {0}[..., :-1]).sum(-1)",
    "transpose": "{0}.transpose(0, -1) + 1",
    "to int": "{0}.clamp(-3, 3).to(torch.int32).sum(-1)",
    "flat": "{0}.reshape(-1)[::2] * 2",
}
SHAPES = ((1,), (7,), (0, 5), (5, 0), (1, 1), (1, 4099), (4099, 1), (3, 31), (2, 1, 3, 1, 5), (17, 255))
FORMS = (
    ("f32", "contiguous", "normal"),
    ("bf16", "misaligned", "special"),
    ("f16", "transposed", "extreme"),
    ("f64", "sliced", "tiny"),
    ("i8", "expanded", "extreme"),
    ("i64", "contiguous", "extreme"),
    ("e5m2", "contiguous", "normal"),
)


def cells() -> Iterator[tuple[str, Graph]]:
    """Every cell's name and function."""
    for k, ((op, text), shape, form) in enumerate(itertools.product(OPS.items(), SHAPES, FORMS)):
        dtype, layout, content = form
        if dtype == "i64" and "float" in text:  # if huge integers cancel in fp32, the result depends on the order of the sum alone
            content = "normal"
        if dtype == "e5m2":  # eager has no arithmetic on it
            text = text.replace("{0}", "{0}.float()")
        given = Input(shape, dtype, layout, content)
        yield f"{op} {dtype} {shape} {layout} {content}", Graph(k, (given,), (Step(op, text, (0,)),), (1,))


def main() -> int:
    """The command."""
    import argparse

    from .graphs import quiet, read

    parser = argparse.ArgumentParser(prog="python -m tests.campaign.edges")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stage", default="interpret")
    given = parser.parse_args()
    quiet()
    from .checks import check

    done = {line["cell"] for line in read(given.log)}
    with given.log.open("a") as out:
        for name, graph in cells():
            if name not in done:
                out.write(json.dumps({"cell": name, **check(graph, given.stage).to_json()}) + "\n")
                out.flush()
    lines = read(given.log)
    bad = [line for line in lines if line["kind"] in ("wrong", "form", "uncoded", "internal", "slow")]
    for line in bad:
        sys.stdout.write(f"{line['cell']}: {line['kind']} {line['where']} {line['detail'][:300]}\n")
    sys.stdout.write(f"{len(lines)} cells: {dict(Counter(line['kind'] for line in lines))}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
