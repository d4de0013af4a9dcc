"""``python -m ds41_tvm`` is the command line ``ds41-tvm``."""

from ds41_tvm.cli import main

if __name__ == "__main__":
    main()
