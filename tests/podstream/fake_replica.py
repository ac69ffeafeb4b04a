"""A replica process with the fake engine: `python fake_replica.py [fake options] -- podstream replica arguments`.

Runs the real `podstream replica` command with another `build_engine`; there is no flag for that in the product.
"""

import argparse
import sys
import threading
import time
import types

from model.errors import CheckpointError
from podstream.cli import main
from tests.fakes import FakeEngineLoop, fake_card


class Engine(FakeEngineLoop):
    def __init__(self, options):
        super().__init__(step_delay_s=options.step_delay_s)
        self._last_step, self._endless_step = options.break_after, options.hang_after

    def _step(self):
        if self.num_steps == self._last_step:
            self.fail()
        if self.num_steps == self._endless_step:
            self.num_steps_begun, self.step_s = 5, 1000.0  # so that nobody has to wait for it
            threading.Event().wait()
        return super()._step()


def make_build(options):
    def build(config, progress):
        progress("loading echo: 1 of 2 MiB")
        time.sleep(options.load_s)
        if options.fail:
            raise CheckpointError("the checkpoint has a hole.")
        return Engine(options), fake_card()

    return build


def parse(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--step-delay-s", type=float, default=0.005)
    parser.add_argument("--break-after", type=int)
    parser.add_argument("--hang-after", type=int)
    parser.add_argument("--fail", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    split = sys.argv.index("--")
    module = types.ModuleType("serving.engine.build")
    module.build_engine = make_build(parse(sys.argv[1:split]))
    sys.modules["serving.engine.build"] = module
    sys.argv = ["podstream", *sys.argv[split + 1 :]]
    main()
