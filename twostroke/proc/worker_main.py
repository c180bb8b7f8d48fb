"""Worker process: the model, or a rank's part of it, behind two shared-memory queues, plans in,
results out.

Started by `worker.executor.ProcessExecutor`, which writes the settings to our standard input and
keeps it open: when it closes, the engine core is gone or done with us.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from twostroke import log
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import TwostrokeError
from twostroke.messages import (
    NO_TOKENS,
    EngineDead,
    EngineProgress,
    EngineReady,
    StepPlan,
    StepResult,
    decoder_for,
    encode,
)
from twostroke.model.parallel import ALONE, Group
from twostroke.proc.deferred import import_torch
from twostroke.shm_queue import ShmReader, ShmRing, ShmWriter
from twostroke.worker.executor import EXIT_CODES, WorkerLaunch

logger = logging.getLogger("twostroke.worker")


def serve(launch: WorkerLaunch, plans: ShmReader, results: ShmWriter) -> int:
    """Load the model and run plans until killed; returns only to fail, with the exit code.

    Rank 0 sends what it finds; the others only that they are ready, what transfers of theirs have
    ended (where KV is handed over), or why they fail.
    """
    from twostroke.worker.runner import ModelRunner

    reports = launch.rank == 0

    def send_progress(stage: str, done: int, total: int) -> None:
        results.put(encode(EngineProgress(stage, done, total)))

    try:
        config = launch.config
        checkpoint = open_checkpoint(Path(launch.checkpoint), load_format=config.load_format)
        progress = send_progress if reports else None
        runner = ModelRunner(config, checkpoint, progress, _group(launch), launch.engine_id)
        ready = EngineReady(
            engine=0,
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=config.block_size,
            facts=runner.facts,
            kv=runner.endpoint,
        )
        results.put(encode(ready))
        gc.freeze()
        gc.enable()
        decoder = decoder_for(StepPlan)
        while True:
            while not plans.ready() and runner.prepare():
                pass
            result = runner.run(decoder.decode(plans.get()))
            if reports:
                results.put(encode(result))
            elif runner.endpoint is not None:
                kv_only = StepResult(
                    step=result.step, num_sampled=NO_TOKENS, token_ids=NO_TOKENS, kv=result.kv
                )
                results.put(encode(kv_only))
    except TwostrokeError as error:
        results.put(encode(EngineDead(str(error))))
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except Exception as error:
        logger.exception("the worker failed")
        results.put(encode(EngineDead(f"{type(error).__name__}: {error}")))
        return 1


def _group(launch: WorkerLaunch) -> Group:
    if launch.config.tensor_parallel_size == 1:
        return ALONE
    from twostroke.worker.ranks import TorchGroup

    return TorchGroup(launch.config, launch.rank, launch.rendezvous_fd)


def _watch_parent() -> None:
    """End this process when the parent's end of our standard input closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Entry point of `python -m twostroke.proc.worker_main PLANS RESULTS`, both `ShmRing.spec`."""
    faulthandler.enable()
    # These reach the whole process group; the API process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until all is loaded, which would be walked again and again
    import_torch()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerLaunch)
    threading.Thread(target=_watch_parent, daemon=True).start()
    log.setup(launch.config.log_level)
    plans, results = (ShmRing.attach(spec) for spec in sys.argv[1:3])
    code = serve(launch, ShmReader(plans, launch.rank), ShmWriter(results))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # daemon threads may sit in native code: do not wait for them


if __name__ == "__main__":
    main()
