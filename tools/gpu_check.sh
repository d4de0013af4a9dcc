#!/usr/bin/env bash
# Check and measure compiled kernels on this machine's GPU: tools/gpu_check.sh BUNDLE.tar [REPORT.md] [options]
#
# BUNDLE.tar is what `ds41-tvm gpu-check --target cuda:sm_90 --out BUNDLE.tar` wrote. Needs Python of the version that
# packed it, NumPy and apache-tvm-ffi (PYTHON chooses the interpreter); torch is measured beside if it is there. Takes at
# most five minutes and leaves one file, the report. Exit code 0: all is right. Options go to gpu_check.py, see --help.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1" ]; then
  echo "usage: $0 BUNDLE.tar [REPORT.md] [options]" >&2
  exit 2
fi
bundle=$1
report=${2:-gpu_check.md}
shift; [ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xf "$bundle" -C "$work"
code=0
"${PYTHON:-python3}" "$(echo "$work"/*/gpu_check.py)" --out "$report" "$@" || code=$?
exit $code
