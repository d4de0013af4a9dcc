"""The command line ``ds41-tvm VERB``: a thin face over the public functions, one file per verb.

Exit codes: 0 good; 1 a check failed, or something could not be done; 2 the command line or an input was
refused; 70 a defect of the package; 129, 130, 143 hung up, interrupted, terminated; 141 the reader of the output went
away.

The modules of the verbs import TVM, NumPy and torch inside their functions only, so that help and mistakes
answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Parameter

from ds41_tvm import __version__
from ds41_tvm.cli import (
    bench,
    bundle_cmd,
    compile_cmd,
    doctor,
    gpu_check_cmd,
    inspect_cmd,
    onnx_cmd,
    run_cmd,
    synth,
    tune_cmd,
    verify,
)
from ds41_tvm.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    Ds41Error,
    InputError,
    TargetError,
    UsageError,
)

REFUSED = (UsageError, ConfigError, CheckpointError, InputError, TargetError, ArtifactError)
ENDINGS = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated", int(signal.SIGHUP): "hung up"}
_received: list[int] = []
REPORT_TO = "the issue tracker of ds41-tvm"


app = App(
    name="ds41-tvm",
    help="DeepSeek-V4.1 sparse attention, compiled with Apache TVM.",
    help_epilogue="Exit codes: 0 good, 1 failed, 2 refused, 70 a defect of ds41-tvm, 130 interrupted.",
    version=__version__,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
app.command(bench.bench)
app.command(bundle_cmd.bundle)
app.command(compile_cmd.compile_command, name="compile")
app.command(doctor.doctor)
app.command(gpu_check_cmd.gpu_check)
app.command(inspect_cmd.inspect)
app.command(onnx_cmd.export_onnx)
app.command(run_cmd.run)
app.command(synth.synth)
app.command(tune_cmd.tune)
app.command(verify.verify)
app.command(onnx_cmd.verify_onnx)
app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(negative="")] = False,
) -> Any:
    """DeepSeek-V4.1 sparse attention, compiled with Apache TVM.

    Parameters
    ----------
    debug
        Show the traceback of an error.
    """
    del debug  # read in `run`, which must know it before anything is parsed
    return app(tokens, exit_on_error=False, print_error=False)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; never raises."""
    debug = "--debug" in arguments
    try:
        code = app.meta(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # here, where a reader that went away can still be noticed
    except CycloptsError as error:
        verb = " ".join(("ds41-tvm", *(error.command_chain or ())))
        return _fail(2, f"{error}\nSee {verb} --help.", debug)
    except Ds41Error as error:
        return _fail(2 if isinstance(error, REFUSED) else 1, str(error), debug)
    except KeyboardInterrupt:
        number = _received.pop() if _received else int(signal.SIGINT)
        return _fail(128 + number, ENDINGS[number], debug)
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, a folder that may not be written; BrokenPipeError is one, too: after it
        place = error.filename2 or error.filename
        return _fail(1, f"{f'{place}: ' if place else ''}{error.strerror or error}", debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever arrives here is a defect of ours
        what = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
        return _fail(70, f"{what}\nPlease report it to {REPORT_TO}, with the output of --debug.", debug)
    return code if isinstance(code, int) else 0


def _fail(code: int, message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"ds41-tvm: {message}", file=sys.stderr)
    return code


def _end(number: int, _frame: object) -> NoReturn:
    """Let a signal that would kill the process unwind it instead, so that temporary files go. A second one kills."""
    signal.signal(number, signal.SIG_DFL)
    _received.append(number)  # an exception that passes through TVM loses what it carries
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Entry point of the script ``ds41-tvm``."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup, which has it ignored
            signal.signal(number, _end)
    sys.exit(run(sys.argv[1:]))
