"""Without torch the comparison says which extra brings it."""

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import ds41_tvm.bench
try:
    import ds41_tvm.bench.torch_official
except ds41_tvm.errors.UsageError as error:
    print(error)
"""


def test_missing_torch_names_the_extra():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert "ds41-tvm[torch]" in done.stdout, done.stderr


def test_importing_bench_imports_nothing_heavy():
    code = "import sys, ds41_tvm.bench; print({'torch', 'tvm', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
