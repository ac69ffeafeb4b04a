"""What the compiler said of each deployment's decode steps, kept with a digest of the programs that it was told of.

To compile them all takes minutes, to lower them seconds: so a program that is the same has the same budget. `make
budgets` writes `budgets.json` anew.
"""

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from serving.engine.batch import StepShape
from serving.engine.step_program import compile_step
from tpu_configs.budget import StepBudget
from tpu_configs.catalog import FOLDER, deployment, deployments
from tpu_configs.check import Ahead, compile_steps

FILE = Path(__file__).with_name("budgets.json")
ROWS = (32, 128)
KERNELS = Path(__file__).parents[2] / "kv"


class Lowered:
    """Stands where `Executables` stand, and compiles nothing."""

    def compiled(self, jitted, args, *described):
        return jitted.lower(*args)


def digest(ahead, shape):
    """Of a program before it is compiled. A kernel is in it as bytes that name files: its sources stand for it."""
    lowered = compile_step(Lowered(), ahead.spec, shape, ahead.weights, ahead.state)
    text = re.sub(r'backend_config = "[^"]*"', "", lowered.as_text())
    sources = [path.read_text() for path in sorted(KERNELS.glob("tpu_*.py"))]
    return sha256("\0".join([text, *sources]).encode()).hexdigest()[:32]


def inputs(name):
    """A digest of the files that describe a deployment."""
    model = deployment(name).settings.model
    paths = FOLDER / "deployments" / f"{name}.toml", FOLDER / "models" / f"{model}.json", FOLDER / "slices.toml"
    return sha256("\0".join(path.read_text() for path in paths).encode()).hexdigest()[:32]


def record(ahead, step):
    """Figures of one compiled decode step."""
    budget = StepBudget.of(step, ahead.deployment)
    return {
        "inputs": inputs(ahead.deployment.name),
        "digest": digest(ahead, step.shape),
        "temporary_bytes": step.temporary_bytes,
        "aliased_bytes": step.aliased_bytes,
        "page_bytes": ahead.num_pages * ahead.page_bytes,
        "weight_bytes": ahead.weight_bytes,
        "program_bytes": step.program_bytes,
        "hbm_bytes": round(budget.hbm_bytes),
        "floor_bytes": budget.floor_bytes,
        "collectives": {kind: list(found) for kind, found in budget.collectives.items()},
        "compile_s": round(step.compile_s, 1),
    }


def compile_records(name, rows=ROWS):
    """Those of a deployment, by rows."""
    ahead = Ahead.of(deployment(name))
    steps = compile_steps(ahead, [StepShape(0, count) for count in rows], lambda _: None)
    return {str(step.shape.rows): record(ahead, step) for step in steps}


def versions():
    return {name: version(name) for name in ("jax", "libtpu")}


def compile_apart(name, rows=ROWS):
    """`compile_records` in a process of its own, without the flags by which the tests' own programs are made fast."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    argv = [sys.executable, "-m", __spec__.name, "--print", name, *map(str, rows)]
    done = subprocess.run(argv, env=env, cwd=FILE.parents[2], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def saved():
    return json.loads(FILE.read_text())


def table(steps):
    """The lines of tpu_configs/README.md."""
    yield "| deployment | HBM / floor, 32 rows | 128 rows | temporaries MiB, 32 | 128 | sums of a step of 128 rows |"
    yield "|---|---|---|---|---|---|"
    for name, by_rows in sorted(steps.items()):
        few, many = (by_rows[str(rows)] for rows in ROWS)
        over = " | ".join(f"{one['hbm_bytes'] / one['floor_bytes']:.3f}" for one in (few, many))
        temporaries = " | ".join(f"{one['temporary_bytes'] >> 20:,}" for one in (few, many))
        count, size = many["collectives"].get("all-reduce", (0, 0))
        yield f"| {name} | {over} | {temporaries} | {f'all-reduce {count} ({size / 1e6:,.1f} MB)' if count else '-'} |"


def main():
    """Compile and write all of them, or those named."""
    if sys.argv[1:2] == ["--print"]:
        print(json.dumps(compile_records(sys.argv[2], tuple(map(int, sys.argv[3:])))))
        return
    names = sys.argv[1:] or deployments()
    for name in names:
        steps = compile_records(name)
        found = saved() if FILE.exists() else {"steps": {}}
        found["steps"][name] = steps
        for rows, figures in steps.items():
            print(name, rows, "rows", figures["compile_s"], "s", f"{figures['hbm_bytes'] / figures['floor_bytes']:.3f}")
        found["versions"] = versions()
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(saved()["steps"])))


if __name__ == "__main__":
    main()
